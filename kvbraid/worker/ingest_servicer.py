"""DraftService.Ingest: decode the chunks of a prompt's rows and give them to the intake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvbraid.errors import DeadlineError, IncompatibleError, InvalidRequestError
from kvbraid.rpc.server import RpcServer
from kvbraid.speculative.proposal import DraftTask
from kvbraid.transport.draft_rows import row_carrier, rows_are_finite
from kvbraid.transport.draft_step import check_drafted_ids, check_key, check_span
from kvbraid.v1 import draft_pb2 as pb
from kvbraid.v1 import draft_pb2_grpc
from kvbraid.worker.prompt_intake import PromptIntake, PromptTarget

Context = grpc.aio.ServicerContext[Any, Any]


class IngestServicer(draft_pb2_grpc.DraftServiceServicer):
    """The gRPC edge of an intake. lease_s: longest silence of a prefill worker."""

    def __init__(self, intake: PromptIntake, *, lease_s: float) -> None:
        self._intake = intake
        self._lease_s = lease_s
        self._carrier = row_carrier(intake.terms.row_format)

    async def Draft(  # type: ignore[override] # a draft service has another one
        self, request_iterator: AsyncIterator[pb.DraftRequest], context: Context
    ) -> None:
        """A worker that drafts for itself drafts for nobody else."""
        raise IncompatibleError("this worker's drafter is its own; ask a draft service")

    async def Ingest(
        self, request_iterator: AsyncIterator[pb.IngestRequest], context: Context
    ) -> pb.IngestResponse:
        """See draft.proto."""
        request = await self._next_chunk(request_iterator)
        if request is None or not request.HasField("target"):
            raise InvalidRequestError("the first message must name its target", field="target")
        grant = await self._intake.begin(_target(request.target))
        num_rows = 0
        try:
            while request is not None:
                num_rows += await self._intake.take(grant, self._chunk(request))
                request = await self._next_chunk(request_iterator)
        finally:
            grant.end()
        return pb.IngestResponse(num_rows=num_rows)

    def _chunk(self, message: pb.IngestRequest) -> DraftTask:
        """Raises InvalidRequestError for rows that no drafter can take."""
        terms = self._intake.terms
        ids = tuple(message.next_token_ids)
        if not 1 <= len(ids) <= terms.max_rows_per_message:
            raise InvalidRequestError(
                f"{len(ids)} rows, accepted: 1 to {terms.max_rows_per_message}",
                field="next_token_ids",
            )
        check_span(message.first_position, len(ids), terms.max_position)
        check_drafted_ids("next_token_ids", ids, terms.vocab_size)
        rows = self._carrier.unpack(message.rows, len(ids))
        if not rows_are_finite(rows):
            raise InvalidRequestError("rows are not finite", field="rows")
        return DraftTask(
            key="",
            first_position=message.first_position,
            rows=rows,
            next_token_ids=ids,
            anchor_id=ids[-1],
            num_wanted=0,
            starts_cold=message.starts_cold,
        )

    async def _next_chunk(
        self, requests: AsyncIterator[pb.IngestRequest]
    ) -> pb.IngestRequest | None:
        try:
            async with asyncio.timeout(self._lease_s):
                return await anext(requests, None)
        except TimeoutError:
            raise DeadlineError(f"no rows came for {self._lease_s} s") from None


def add_ingest_service(server: RpcServer, servicer: IngestServicer) -> None:
    """Serve `servicer` on `server`."""
    server.add(
        draft_pb2_grpc.add_DraftServiceServicer_to_server, servicer, "kvbraid.v1.DraftService"
    )


def _target(message: pb.IngestTarget) -> PromptTarget:
    check_key(message.key)
    return PromptTarget(
        transfer_id=message.transfer_id,
        incarnation=message.incarnation,
        key=message.key,
        drafter_digest=message.drafter_digest,
        hidden_size=message.hidden_size,
        row_dtype=message.row_dtype,
    )
