"""Clients that ask for more than a cluster has room for; what they are refused is wanted."""

from __future__ import annotations

import random
import threading
from typing import Self

import grpc

from kvbraid.v1 import coordinator_pb2, coordinator_pb2_grpc, generation_pb2

_PAUSE_S = 0.2


class Crowd:
    """A context manager: each client asks with prompts of its own, again and again."""

    def __init__(self, rpc: str, *, num_clients: int, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._stop = threading.Event()
        self._channel = grpc.insecure_channel(rpc)
        self._threads = [
            threading.Thread(target=self._ask, args=(seed,), daemon=True)
            for seed in range(num_clients)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._channel.close()
        for thread in self._threads:
            thread.join(timeout=30)

    def _ask(self, seed: int) -> None:
        rng = random.Random(seed)
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(self._channel)
        while not self._stop.wait(_PAUSE_S):
            ids = [rng.randrange(5, 300) for _ in range(self._num_prompt_tokens)]
            request = coordinator_pb2.GenerateRequest(
                prompt_ids=coordinator_pb2.TokenIds(ids=ids),
                sampling=generation_pb2.SamplingParams(temperature=0.0, max_tokens=8),
            )
            try:
                list(stub.Generate(request, timeout=120))
            except (grpc.RpcError, ValueError):  # refused, or the channel was closed
                self._stop.wait(_PAUSE_S)
