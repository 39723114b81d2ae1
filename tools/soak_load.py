"""Mild load of every kind: streams, cancels of both APIs, seeds, stop strings."""

from __future__ import annotations

import json
import random
import threading
import urllib.request
from collections import Counter
from collections.abc import Generator
from typing import Any, Self

import grpc

from kvbraid.v1 import coordinator_pb2, coordinator_pb2_grpc, generation_pb2

_WORDS = ("the", "sky", "is", "blue", "because", "light", "of", "short", "waves", "scatters")
_NUM_CLIENTS = 3
_TIMEOUT_S = 60
_NUM_SEEDS = 5
_STOPS = ["e", "a", "\n"]


class SoakLoad:
    """A context manager: clients that ask with pauses between, until it ends.

    pause_s: mean pause of a client; hurry: how many times shorter it is now. counts: finished
    requests by kind. errors: what went wrong, nothing when all is well. num_seeded_differ: answers
    that an equal seed gave differently.
    """

    def __init__(self, http: str, rpc: str, model: str, *, pause_s: float) -> None:
        self._url = f"http://{http}/v1/completions"
        self._rpc = rpc
        self._model = model
        self._pause_s = pause_s
        self.hurry = 1.0
        self._stop = threading.Event()
        self._seeded: dict[int, str] = {}
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.num_seeded_differ = 0
        self._threads = [
            threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(_NUM_CLIENTS)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=_TIMEOUT_S)

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        kinds = {
            "stream": self._stream, "cancelled stream": self._leave, "seed": self._seed,
            "stop string": self._stop_string, "grpc": self._call, "cancelled grpc": self._cancel,
        }  # fmt: skip
        with grpc.insecure_channel(self._rpc) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            while not self._stop.wait(rng.expovariate(self.hurry / self._pause_s)):
                kind = rng.choice(list(kinds))
                try:
                    kinds[kind](rng, stub)
                    self.counts[kind] += 1
                except (OSError, grpc.RpcError, AssertionError) as error:
                    self.errors.append(f"{kind}: {error!r}")

    def _stream(self, rng: random.Random, _: Any) -> None:
        chunks = list(self._answer(_prompt(rng), stream=True, max_tokens=24, ignore_eos=True))
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"

    def _leave(self, rng: random.Random, _: Any) -> None:
        answer = self._answer(_prompt(rng), stream=True, max_tokens=200, ignore_eos=True)
        for _ in range(rng.randrange(1, 9)):
            next(answer)
        answer.close()

    def _seed(self, rng: random.Random, _: Any) -> None:
        seed = rng.randrange(_NUM_SEEDS)
        (answer,) = self._answer(" ".join(_WORDS), max_tokens=16, temperature=1.0, seed=seed)
        text = answer["choices"][0]["text"]
        self.num_seeded_differ += self._seeded.setdefault(seed, text) != text

    def _stop_string(self, rng: random.Random, _: Any) -> None:
        (answer,) = self._answer(_prompt(rng), max_tokens=24, temperature=0.0, stop=_STOPS)
        text = answer["choices"][0]["text"]
        assert not any(stop in text for stop in _STOPS), text

    def _call(self, rng: random.Random, stub: Any) -> None:
        responses = list(stub.Generate(_request(rng, 12), timeout=_TIMEOUT_S))
        assert sum(len(r.chunk.token_ids) for r in responses) == 12

    def _cancel(self, rng: random.Random, stub: Any) -> None:
        call = stub.Generate(_request(rng, 200), timeout=_TIMEOUT_S)
        # From before the prompt is computed until into the answer.
        self._stop.wait(rng.uniform(0.0, 0.4))
        call.cancel()

    def _answer(self, prompt: str, **fields: Any) -> Generator[dict[str, Any], None, None]:
        """The answer, or with stream its chunks; closing the generator closes the connection."""
        body = {"model": self._model, "prompt": prompt, **fields}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            if not fields.get("stream"):
                yield json.load(response)
                return
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))


def _prompt(rng: random.Random) -> str:
    """Some begin alike and are cached, some are short and computed by the decode worker."""
    shared = " ".join(random.Random(rng.randrange(3)).choices(_WORDS, k=60))
    words = " ".join(rng.choices(_WORDS, k=rng.choice((2, 30))))
    return f"{shared} {words}" if rng.random() < 0.6 else words


def _request(rng: random.Random, max_tokens: int) -> coordinator_pb2.GenerateRequest:
    ids = [rng.randrange(5, 300) for _ in range(rng.randrange(2, 300))]
    return coordinator_pb2.GenerateRequest(
        prompt_ids=coordinator_pb2.TokenIds(ids=ids),
        sampling=generation_pb2.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True
        ),
    )
