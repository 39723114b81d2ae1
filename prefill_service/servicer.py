"""PrefillService: decode the message, run the prompt, encode what happened."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from kvbraid.transport.wire import grant_from_proto
from kvbraid.v1 import prefill_pb2, prefill_pb2_grpc
from kvbraid.wire import chunk_to_proto, ref_from_proto, sampling_from_proto
from prefill_service.worker import FirstToken, PrefillWorker, Prompt, PromptHandedOver

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """The gRPC edge of a prefill worker."""

    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """See prefill.proto."""
        prompt = Prompt(
            ref=ref_from_proto(request.ref),
            index=request.index,
            token_ids=tuple(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=sampling_from_proto(request.sampling),
            cache_salt=request.cache_salt,
            grant=grant_from_proto(request.grant),
        )
        async with aclosing(self._worker.prefill(prompt)) as events:
            async for event in events:
                match event:
                    case FirstToken(chunk, cached):
                        yield prefill_pb2.PrefillResponse(
                            first=chunk_to_proto(chunk), num_cached_tokens=cached
                        )
                    case PromptHandedOver(sent):
                        yield prefill_pb2.PrefillResponse(
                            done=prefill_pb2.HandoffDone(
                                num_bytes=sent.num_bytes,
                                num_rows=sent.num_rows,
                                queue_us=round(sent.queue_s * 1e6),
                                compute_us=round(sent.compute_s * 1e6),
                                transfer_us=round(sent.transfer_s * 1e6),
                            )
                        )
