"""A small client of the coordinator's Generate, as the commands need it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvbraid.errors import InvalidRequestError
from kvbraid.rpc.channels import ChannelPool
from kvbraid.rpc.client_errors import translated_rpc_errors
from kvbraid.settings import ServerSettings, TlsSettings
from kvbraid.v1 import coordinator_pb2, coordinator_pb2_grpc, generation_pb2

_FINISH_PREFIX = "FINISH_REASON_"


@dataclass(slots=True)
class Generation:
    """What came back. Seconds are from sending the request."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    first_token_seconds: float = 0.0
    seconds: float = 0.0

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), ensure_ascii=False)


def read_prompt_ids(path: str | Path) -> list[int]:
    """Token ids of a file: a JSON list, or numbers with white space or commas between.

    Raises InvalidRequestError naming the file and what is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        return [int(word) for word in text.strip().strip("[]").replace(",", " ").split()]
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"prompt ids in {path}: {error}", field="prompt_ids") from error


async def generate(
    target: str,
    request: coordinator_pb2.GenerateRequest,
    *,
    timeout_s: float,
    on_text: Callable[[str], None] = lambda _: None,
    tls: TlsSettings | None = None,
) -> Generation:
    """Send `request` (n = 1) to the coordinator at `target` and gather its stream.

    `on_text` gets each piece of text as it comes. tls: None: plaintext. Raises the KVBraidError the
    coordinator answers, and ConfigError for certificates that cannot be used.
    """
    result = Generation()
    started = time.monotonic()
    async with ChannelPool(ServerSettings(tls=tls or TlsSettings())) as pool:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(pool.channel(target))
        with translated_rpc_errors(target):
            async for response in stub.Generate(request, timeout=timeout_s):
                _add(result, response, time.monotonic() - started)
                if response.text:
                    on_text(response.text)
    result.seconds = time.monotonic() - started
    return result


def _add(result: Generation, response: coordinator_pb2.GenerateResponse, elapsed_s: float) -> None:
    if response.chunk.token_ids and not result.token_ids:
        result.first_token_seconds = elapsed_s
    result.token_ids.extend(response.chunk.token_ids)
    result.text += response.text
    if response.chunk.finish_reason:
        name = generation_pb2.FinishReason.Name(response.chunk.finish_reason)
        result.finish_reason = name.removeprefix(_FINISH_PREFIX).lower()
    if response.HasField("usage"):
        result.num_prompt_tokens = response.usage.num_prompt_tokens
        result.num_completion_tokens = response.usage.num_completion_tokens
        result.num_cached_tokens = response.usage.num_cached_tokens
