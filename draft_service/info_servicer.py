"""InfoService of a draft service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

from draft_service.batcher import Proposes
from kvbraid import __version__
from kvbraid.transport.draft_terms import DraftTerms
from kvbraid.v1 import info_pb2, info_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class DraftIdentity:
    """Facts of a draft service that never change while it runs."""

    model_name: str
    num_pool_tokens: int
    metrics_address: str


class DraftInfoServicer(info_pb2_grpc.InfoServiceServicer):
    """What this draft service is and how full it is. It has no KV layout: nobody hands KV to it."""

    def __init__(self, identity: DraftIdentity, terms: DraftTerms, proposer: Proposes) -> None:
        self._identity = identity
        self._terms = terms
        self._proposer = proposer

    async def Info(self, request: info_pb2.InfoRequest, context: Context) -> info_pb2.InfoResponse:
        """See info.proto."""
        return info_pb2.InfoResponse(
            role="draft",
            version=__version__,
            incarnation=self._terms.epoch,
            model=self._identity.model_name,
            model_digest=self._terms.drafter_digest,
            max_model_len=self._terms.max_position,
            num_pool_tokens=self._identity.num_pool_tokens,
            num_free_tokens=self._proposer.num_free_tokens,
            num_running=self._proposer.num_sequences,
            max_num_seqs=self._terms.max_sequences,
            metrics_address=self._identity.metrics_address,
        )
