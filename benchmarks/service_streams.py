"""Streams of a running cluster: what they emitted, how fast, and what was drafted for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import uvloop

from benchmarks.clusters import open_channel
from kvbraid.v1 import coordinator_pb2, coordinator_pb2_grpc, generation_pb2

_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer. windows: (drafts verified, drafts accepted) of each step that had some.
    num_steps: all of its steps."""

    token_ids: tuple[int, ...]
    windows: tuple[tuple[int, int], ...]
    num_steps: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Streams that ran together, and the seconds from the first request to the last token; of
    several samples the sum."""

    streams: tuple[Stream, ...]
    seconds: float

    @classmethod
    def joined(cls, samples: Sequence[Sample]) -> Sample:
        """Of samples that were taken one after the other."""
        streams = tuple(stream for sample in samples for stream in sample.streams)
        return cls(streams, sum(sample.seconds for sample in samples))

    @property
    def num_tokens(self) -> int:
        """Of all streams."""
        return sum(len(stream.token_ids) for stream in self.streams)

    @property
    def rate(self) -> float:
        """Tokens a second of all streams together."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Of many streams. windows: steps of a stream that verified drafts."""

    num_windows: int
    num_verified: int
    num_accepted: int
    num_steps: int

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> DraftCounts:
        """Summed over all streams of the samples."""
        streams = [stream for sample in samples for stream in sample.streams]
        windows = [window for stream in streams for window in stream.windows]
        return cls(
            len(windows),
            sum(verified for verified, _ in windows),
            sum(accepted for _, accepted in windows),
            sum(stream.num_steps for stream in streams),
        )

    @property
    def acceptance_length(self) -> float:
        """Tokens that a window emits, the target's own included; 1 without windows."""
        return 1.0 + self.num_accepted / max(1, self.num_windows)


def run_streams(
    address: str,
    prompts: Sequence[str],
    max_tokens: int,
    *,
    num_at_once: int | None = None,
    max_draft_tokens: int | None = None,
) -> Sample:
    """All prompts, as chats, greedily, under fresh salts so that nothing is cached.

    address: gRPC of the coordinator. num_at_once: streams that run at once, all of them unless
    given; when one ends the next begins. max_draft_tokens: of each request; None: the worker's
    choice.
    """
    places = num_at_once or max(1, len(prompts))
    return uvloop.run(_run(address, prompts, max_tokens, places, max_draft_tokens))


async def _run(
    address: str,
    prompts: Sequence[str],
    max_tokens: int,
    num_at_once: int,
    max_draft_tokens: int | None,
) -> Sample:
    sampling = generation_pb2.SamplingParams(
        temperature=0, max_tokens=max_tokens, max_draft_tokens=max_draft_tokens
    )
    async with open_channel(address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        await channel.channel_ready()
        began = time.perf_counter()
        places = asyncio.Semaphore(num_at_once)

        async def run(text: str) -> Stream:
            async with places:
                return await _stream(stub, text, sampling)

        streams = await asyncio.gather(*map(run, prompts))
        return Sample(tuple(streams), time.perf_counter() - began)


async def _stream(
    stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub,
    text: str,
    sampling: generation_pb2.SamplingParams,
) -> Stream:
    request = coordinator_pb2.GenerateRequest(
        chat=coordinator_pb2.ChatMessages(
            messages=[coordinator_pb2.ChatMessage(role="user", content=text)]
        ),
        sampling=sampling,
        cache_salt=str(time.perf_counter_ns()),
    )
    tokens: list[int] = []
    windows: list[tuple[int, int]] = []
    num_steps = 0
    async for response in stub.Generate(request, timeout=_TIMEOUT_S):
        chunk = response.chunk
        tokens += chunk.token_ids
        # A message may bring several steps; where none has drafts, each has a token.
        num_steps += len(chunk.windows) or len(chunk.token_ids)
        windows += (
            (window.num_draft_tokens, window.num_accepted_tokens)
            for window in chunk.windows
            if window.num_draft_tokens
        )
    return Stream(tuple(tokens), tuple(windows), num_steps)
