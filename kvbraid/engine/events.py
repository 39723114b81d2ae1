"""What the engine tells the servicers; plain values that may cross threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvbraid.engine.sequence import SequenceKey
from kvbraid.errors import KVBraidError
from kvbraid.request import TokenChunk
from kvbraid.transport.grants import Grant


@dataclass(frozen=True, slots=True)
class TokensReady:
    """New tokens of a sequence; num_cached_tokens are prompt tokens found in the prefix cache."""

    key: SequenceKey
    chunk: TokenChunk
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class GrantReady:
    """Every rank takes rows of this grant now."""

    key: SequenceKey
    grant: Grant
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class PromptSent:
    """Every row of a prompt is in the decode worker's pools.

    Times in seconds: waiting for a place, computing, and from the last chunk to the last
    acknowledgement.
    """

    key: SequenceKey
    num_bytes: int
    num_rows: int
    queue_s: float
    compute_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True)
class RowsReceived:
    """Every row of a handed-off prompt is in this worker's pools; seconds since the grant."""

    key: SequenceKey
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The sequence ended with an error; its pages are free."""

    key: SequenceKey
    error: KVBraidError


EngineEvent = TokensReady | GrantReady | PromptSent | RowsReceived | RequestFailed


@dataclass(frozen=True, slots=True)
class StepReport:
    """Figures of one step for metrics. num_sampled: tokens that were emitted. queue_waits_s: of the
    sequences admitted for the first time. The last five are totals since the start of the process,
    the prefix figures in tokens, wasted tokens by reason."""

    seconds: float
    num_decodes: int
    num_extend_tokens: int
    num_sampled: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    queue_waits_s: tuple[float, ...]
    num_preemptions: int
    wasted_tokens: Mapping[str, int]
    num_prefix_queried: int
    num_prefix_hit: int
    num_evicted_pages: int
