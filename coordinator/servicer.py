"""The gRPC edge of the coordinator: decode, call, encode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import grpc

from coordinator.completion import CompletionDelta
from coordinator.deadline import Deadline
from coordinator.front import Front
from coordinator.intake import Prompt, RequestDraft
from coordinator.registry import Pool, Registry
from kvbraid import __version__
from kvbraid.errors import InvalidRequestError
from kvbraid.kv.prefix_cache import HASH_BLOCK_TOKENS
from kvbraid.rpc.deadline import remaining_seconds
from kvbraid.v1 import coordinator_pb2, coordinator_pb2_grpc, info_pb2, info_pb2_grpc
from kvbraid.wire import fill_chunk, messages_from_proto, sampling_from_proto, usage_to_proto

Context = grpc.aio.ServicerContext[Any, Any]

_API = "grpc"


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Serves CoordinatorService."""

    def __init__(self, front: Front, *, request_timeout_s: float) -> None:
        self._front = front
        self._request_timeout_s = request_timeout_s

    async def Generate(  # type: ignore[override] # writes to the context itself, which grpc takes too
        self, request: coordinator_pb2.GenerateRequest, context: Context
    ) -> None:
        """See coordinator.proto."""
        deadline = Deadline(remaining_seconds(context, self._request_timeout_s))
        draft = RequestDraft(
            prompt=_prompt(request),
            sampling=sampling_from_proto(request.sampling),
            request_id=request.request_id,
            model=request.model,
            cache_salt=request.cache_salt,
        )
        (admitted,) = await self._front.admit([draft], _API)
        with deadline.limited() as wait:
            async with aclosing(self._front.run(admitted, deadline, _API)) as deltas:
                async for delta in deltas:
                    response = _response(admitted.request_id, delta)
                    with wait:
                        await context.write(response)


class CoordinatorInfo(info_pb2_grpc.InfoServiceServicer):
    """Serves InfoService for the coordinator itself."""

    def __init__(
        self,
        *,
        registry: Registry,
        front: Front,
        incarnation: int,
        metrics_address: str,
        http_address: str,
        num_running: Callable[[], int],
    ) -> None:
        self._registry = registry
        self._front = front
        self._incarnation = incarnation
        self._metrics_address = metrics_address
        self._http_address = http_address
        self._num_running = num_running

    async def Info(self, request: info_pb2.InfoRequest, context: Context) -> info_pb2.InfoResponse:
        """See info.proto. Model facts are the decode workers'."""
        response = info_pb2.InfoResponse(
            role="coordinator",
            version=__version__,
            incarnation=self._incarnation,
            model=self._front.intake.model_name,
            num_running=self._num_running(),
            metrics_address=self._metrics_address,
            http_address=self._http_address,
            hash_block_tokens=HASH_BLOCK_TOKENS,
        )
        if self._registry.model is not None:
            response.model_digest = self._registry.model.model_digest
        if self._registry.up(Pool.DECODE):
            response.max_model_len = self._registry.limits().max_model_len
        return response


def _prompt(request: coordinator_pb2.GenerateRequest) -> Prompt:
    match request.WhichOneof("input"):
        case "prompt":
            return request.prompt
        case "chat":
            return messages_from_proto(request.chat)
        case "prompt_ids":
            return request.prompt_ids.ids
        case _:
            raise InvalidRequestError(
                "input is not set; accepted: one of prompt, chat, prompt_ids", field="input"
            )


def _response(request_id: str, delta: CompletionDelta) -> coordinator_pb2.GenerateResponse:
    response = coordinator_pb2.GenerateResponse(
        request_id=request_id, index=delta.index, text=delta.text
    )
    fill_chunk(response.chunk, delta.chunk)
    if delta.usage is not None:
        response.usage.CopyFrom(usage_to_proto(delta.usage))
    return response
