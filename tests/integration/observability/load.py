"""Clients of both APIs that keep a cluster busy."""

from __future__ import annotations

import itertools
import json
import random
import ssl
import threading
import urllib.request
from typing import Self

import grpc

from kvbraid.rpc.credentials import credentials_of
from kvbraid.settings import TlsSettings
from kvbraid.v1 import coordinator_pb2, coordinator_pb2_grpc, generation_pb2

_WORDS = ("the", "sky", "is", "blue", "because", "light", "of", "short", "waves", "scatters")


_PROMPT_TOKENS = 600
_PAUSE_S = 0.1
# From before the prompt begins to be computed until after it on any machine.
_CANCEL_AFTER_S = (0.0, 0.4)


class Load:
    """A context manager: clients of HTTP and gRPC ask without pause. Some leave in the middle of
    the answer, some before it begins. tls: how they call."""

    def __init__(self, http: str, rpc: str, model: str, tls: TlsSettings) -> None:
        self._url = f"{'https' if tls.calls else 'http'}://{http}/v1/completions"
        self._https = _https_context(tls) if tls.calls else None
        self._rpc = rpc
        self._credentials = credentials_of(tls).current().channel
        self._model = model
        self._stop = threading.Event()
        tasks = [(self._ask, (0,)), (self._ask, (1,)), (self._call, ())]
        self._threads = [
            threading.Thread(target=run, args=arguments, daemon=True) for run, arguments in tasks
        ]
        self.num_answers = 0
        self.errors: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=30)

    def _ask(self, seed: int) -> None:
        rng = random.Random(seed)
        shared = " ".join(rng.choices(_WORDS, k=120))
        for turn in itertools.count():
            if self._stop.is_set():
                return
            # Short prompts are computed by the decode worker, long ones repeat a cached beginning.
            words = rng.choices(_WORDS, k=2 if turn % 4 == 0 else 40)
            prompt = " ".join(words) if turn % 4 == 0 else f"{shared} {' '.join(words)}"
            try:
                self._stream(prompt, leave_early=seed == 0 and turn % 3 == 2)
            except OSError as error:
                self.errors.append(str(error))
                self._stop.wait(_PAUSE_S)

    def _call(self) -> None:
        rng = random.Random(2)
        with self._channel() as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            for turn in itertools.count():
                if self._stop.is_set():
                    return
                prompt = [rng.randrange(5, 300) for _ in range(_PROMPT_TOKENS)]
                request = coordinator_pb2.GenerateRequest(
                    prompt_ids=coordinator_pb2.TokenIds(ids=prompt),
                    sampling=generation_pb2.SamplingParams(temperature=0.0, max_tokens=8),
                )
                call = stub.Generate(request, timeout=60)
                if turn % 2:
                    self._stop.wait(rng.uniform(*_CANCEL_AFTER_S))
                    call.cancel()
                    continue
                try:
                    self.num_answers += len(list(call)) > 0
                except grpc.RpcError as error:
                    self.errors.append(str(error))
                    self._stop.wait(_PAUSE_S)

    def _channel(self) -> grpc.Channel:
        if self._credentials is None:
            return grpc.insecure_channel(self._rpc)
        return grpc.secure_channel(self._rpc, self._credentials)

    def _stream(self, prompt: str, *, leave_early: bool) -> None:
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": 400 if leave_early else 24,
            "temperature": 0, "stream": True, "ignore_eos": True,
        }  # fmt: skip
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60, context=self._https) as response:
            for number, line in enumerate(response):
                if leave_early and number > 8:
                    return
                if line.startswith(b"data: [DONE]"):
                    break
        self.num_answers += 1


def _https_context(tls: TlsSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.tls_server_ca)
    certificate, private_key = tls.shown_pair
    context.load_cert_chain(certificate, private_key)
    return context
