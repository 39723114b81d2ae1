"""`python -m tests.deploy.cluster.client JSON`: a client in a pod of its own.

Writes one JSON object a line to stdout. {"do": name of one of ACTIONS, ...}
"""

from __future__ import annotations

import json
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from kvbraid.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    generation_pb2,
    info_pb2,
    info_pb2_grpc,
)

_DEADLINE_S = 60.0


def open_channel(target: str, pem_texts: list[str]) -> grpc.Channel:
    """In plaintext, or over TLS with the texts of an authority and then of a key and its
    certificate."""
    if not pem_texts:
        return grpc.insecure_channel(target)
    credentials = grpc.ssl_channel_credentials(*(text.encode() for text in pem_texts))
    return grpc.secure_channel(target, credentials)


def generate(
    target: str, prompt_ids: list[int], max_tokens: int, pem_texts: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Tokens as they come: {"at": monotonic seconds, "tokens"}, then {"end": finish status}."""
    request = coordinator_pb2.GenerateRequest(
        prompt_ids=coordinator_pb2.TokenIds(ids=prompt_ids),
        sampling=generation_pb2.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True
        ),
    )
    with open_channel(target, pem_texts or []) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        try:
            for answer in stub.Generate(request, timeout=_DEADLINE_S):
                yield {"at": time.monotonic(), "tokens": list(answer.chunk.token_ids)}
        except grpc.RpcError as error:
            yield {"end": f"{error.code().name}: {error.details()}"}
            return
    yield {"end": "OK"}


def incarnations(target: str, channels: int, seconds: float = 0.0) -> Iterator[dict[str, Any]]:
    """Which process answers each of so many fresh channels, asked again and again for a time."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    held = [grpc.insecure_channel(target, options=options) for _ in range(channels)]
    stubs = [info_pb2_grpc.InfoServiceStub(channel) for channel in held]
    end = time.monotonic() + seconds
    while True:
        found = [stub.Info(info_pb2.InfoRequest(), timeout=_DEADLINE_S) for stub in stubs]
        yield {"incarnations": [f"{answer.role}:{answer.incarnation}" for answer in found]}
        if time.monotonic() >= end:
            break
        time.sleep(0.1)
    for channel in held:
        channel.close()


def get(url: str) -> Iterator[dict[str, Any]]:
    """The text of a page."""
    with urllib.request.urlopen(url, timeout=_DEADLINE_S) as answer:
        yield {"text": answer.read().decode()}


def complete(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Lines of an HTTP API's event stream."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=_DEADLINE_S) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield {"event": line.removeprefix(b"data: ").decode().strip()}


def connect(host: str, port: int) -> Iterator[dict[str, Any]]:
    """Whether a TCP connection comes about: {"error": ""} or why not."""
    try:
        socket.create_connection((host, port), timeout=2).close()
        yield {"error": ""}
    except OSError as error:
        yield {"error": f"{type(error).__name__}: {error}"}


ACTIONS: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
    "generate": generate, "incarnations": incarnations, "get": get, "complete": complete,
    "connect": connect,
}  # fmt: skip

if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    for result in ACTIONS[wanted.pop("do")](**wanted):
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
