"""Ask a running coordinator over gRPC: python examples/grpc_client.py HOST:PORT "a question".

Over TLS with the files CA.crt [CLIENT.key CLIENT.crt] behind the question.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import grpc

from kvbraid.v1 import coordinator_pb2, coordinator_pb2_grpc, generation_pb2


def open_channel(target: str, pem_files: Sequence[str]) -> grpc.Channel:
    """In plaintext without files."""
    if not pem_files:
        return grpc.insecure_channel(target)
    files = [Path(path).read_bytes() for path in pem_files]
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(*files))


def ask(target: str, question: str, pem_files: Sequence[str] = ()) -> None:
    """Streams the answer to stdout, then prints the token counts."""
    request = coordinator_pb2.GenerateRequest(
        chat=coordinator_pb2.ChatMessages(
            messages=[coordinator_pb2.ChatMessage(role="user", content=question)]
        ),
        sampling=generation_pb2.SamplingParams(temperature=0, max_tokens=64),
    )
    with open_channel(target, pem_files) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        for response in stub.Generate(request, timeout=120):
            print(response.text, end="", flush=True)
        usage = response.usage
    print(f"\n[{usage.num_prompt_tokens} prompt + {usage.num_completion_tokens} new tokens]")


if __name__ == "__main__":
    ask(sys.argv[1], sys.argv[2], sys.argv[3:])
