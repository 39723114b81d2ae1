"""A decode worker whose engine is a clock: a token a step for every sequence, and no model.

python -m benchmarks.clock_worker --step-seconds 0.003      # started by benchmarks.stream_cpu

Servicer, streams and server are those of a decode worker.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import uvloop

from decode_service.servicer import DecodeServicer
from decode_service.worker import DecodeWorker
from kvbraid.engine.engine import Engine
from kvbraid.engine.events import EngineEvent, TokensReady
from kvbraid.engine.sequence import EngineRequest, SequenceKey
from kvbraid.request import FinishReason, SamplingParams, TokenChunk
from kvbraid.rpc.parent import die_with_parent
from kvbraid.rpc.ready import write_ready
from kvbraid.rpc.server import RpcServer
from kvbraid.settings import ServerSettings
from kvbraid.telemetry.metrics import WorkerMetrics
from kvbraid.v1 import decode_pb2_grpc, info_pb2, info_pb2_grpc
from kvbraid.worker.request_streams import RequestStreams
from kvbraid.worker.worker import Worker

_FIRST_ID, _NUM_IDS = 100, 700


class ClockEngine(threading.Thread):
    """Delivers a token of every sequence each `step_s` seconds."""

    def __init__(self, deliver: Callable[[EngineEvent], None], step_s: float) -> None:
        super().__init__(daemon=True)
        self._deliver = deliver
        self._step_s = step_s
        self._num_left: dict[SequenceKey, int] = {}

    def submit(self, request: EngineRequest) -> None:
        """See Engine."""
        self._num_left[request.key] = request.sampling.max_tokens or 1

    def abort(self, key: SequenceKey, done: Callable[[bool], None]) -> None:
        """See Engine."""
        done(self._num_left.pop(key, None) is not None)

    def run(self) -> None:
        """Steps, each as soon as it is due: a late one makes none of the others early."""
        due = time.monotonic()
        while True:
            for key in list(self._num_left):
                self._step(key)
            due = max(due + self._step_s, time.monotonic())
            time.sleep(due - time.monotonic() if due > time.monotonic() else 0.0)

    def _step(self, key: SequenceKey) -> None:
        num_left = self._num_left.pop(key, 0)
        if num_left == 0:
            return
        token_ids = (_FIRST_ID + num_left % _NUM_IDS,)
        reason = FinishReason.LENGTH if num_left == 1 else None
        if num_left > 1:
            self._num_left[key] = num_left - 1
        self._deliver(TokensReady(key, TokenChunk(token_ids, (), reason), 0))


class _ClockWorker:
    """What DecodeWorker needs of a worker that takes everything."""

    def __init__(self, streams: RequestStreams) -> None:
        self.streams = streams

    def sampling_for(self, sampling: SamplingParams, *_: Any) -> SamplingParams:
        return sampling


class _Info(info_pb2_grpc.InfoServiceServicer):
    async def Info(self, request: info_pb2.InfoRequest, context: Any) -> info_pb2.InfoResponse:
        return info_pb2.InfoResponse(
            role="decode", incarnation=secrets.randbits(64), model="clock", model_digest="clock",
            max_model_len=1 << 20, num_pool_tokens=1 << 30, num_free_tokens=1 << 30,
            max_num_seqs=1024,
        )  # fmt: skip


async def _serve(step_s: float, ready_file: str) -> None:
    streams = RequestStreams(asyncio.get_running_loop())
    engine = ClockEngine(streams.deliver, step_s)
    streams.attach(cast(Engine, engine))
    engine.start()
    server = RpcServer(
        role="decode", settings=ServerSettings(), metrics=WorkerMetrics("decode").rpc
    )
    worker = DecodeWorker(cast(Worker, _ClockWorker(streams)))
    server.add(
        decode_pb2_grpc.add_DecodeServiceServicer_to_server,
        DecodeServicer(worker),
        "kvbraid.v1.DecodeService",
    )
    server.add(info_pb2_grpc.add_InfoServiceServicer_to_server, _Info(), "kvbraid.v1.InfoService")
    await server.start()
    await server.set_serving(True)
    write_ready(ready_file, server.ready_report(metrics=""))
    await server.wait_stopped()


def main() -> None:
    """Serves until its parent ends or stops it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-seconds", type=float, required=True)
    parser.add_argument("--ready-file", default="")
    parser.add_argument("--parent-pid", type=int, default=0)
    arguments, _ = parser.parse_known_args()  # the flags of every worker are of no use here
    die_with_parent(arguments.parent_pid or os.getppid())
    uvloop.run(_serve(arguments.step_seconds, arguments.ready_file))


if __name__ == "__main__":
    main()
