"""InfoService of a worker."""

from __future__ import annotations

from typing import Any

import grpc

from kvbraid import __version__
from kvbraid.kv.prefix_cache import HASH_BLOCK_TOKENS
from kvbraid.rpc.server import RpcServer
from kvbraid.transport.wire import layout_to_proto
from kvbraid.v1 import info_pb2, info_pb2_grpc
from kvbraid.worker.worker import Worker

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerInfoServicer(info_pb2_grpc.InfoServiceServicer):
    """What this worker is, how it is laid out and how full it is."""

    def __init__(self, worker: Worker, metrics_address: str) -> None:
        self._worker = worker
        self._metrics_address = metrics_address

    async def Info(self, request: info_pb2.InfoRequest, context: Context) -> info_pb2.InfoResponse:
        """See info.proto."""
        worker, identity = self._worker, self._worker.identity
        pages = worker.pages_by_state()
        page_tokens = worker.layout.stripe(0).logical_page_size
        response = info_pb2.InfoResponse(
            role=identity.role,
            version=__version__,
            incarnation=identity.incarnation,
            model=identity.model_name,
            model_digest=worker.layout.model_digest,
            layout=layout_to_proto(worker.layout),
            attention_backend=identity.attention_backend,
            exchange=identity.exchange,
            q_mode=identity.q_mode,
            communicator=identity.communicator,
            max_model_len=identity.max_model_len,
            num_pool_tokens=identity.num_pool_tokens,
            num_free_tokens=(pages["free"] + pages["cached"]) * page_tokens,
            num_running=worker.num_running,
            num_waiting=worker.num_waiting,
            max_num_seqs=identity.max_num_seqs,
            num_queued_prompt_tokens=worker.num_queued_tokens,
            metrics_address=self._metrics_address,
            hash_block_tokens=HASH_BLOCK_TOKENS,
            pages=pages,
        )
        if request.with_rows:
            rows = await worker.streams.report_rows()
            response.rows_per_rank.extend(rows[:, 0].tolist())
            response.pool_bytes_per_rank.extend(rows[:, 1].tolist())
        return response


def add_info_service(server: RpcServer, servicer: WorkerInfoServicer) -> None:
    """Serve `servicer` on `server`."""
    server.add(info_pb2_grpc.add_InfoServiceServicer_to_server, servicer, "kvbraid.v1.InfoService")
