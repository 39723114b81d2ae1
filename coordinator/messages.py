"""What the coordinator says to workers and hears from them, free of the wire."""

from __future__ import annotations

from dataclasses import dataclass

from kvbraid.request import RequestRef, SamplingParams, TokenChunk


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One completion in one attempt, as workers take it.

    token_ids: the client's prompt, then the tokens that earlier attempts emitted.
    sampling: seed and max_tokens are set. max_tokens counts this attempt's tokens only, min_tokens
    and penalties count from num_prompt_tokens on; stop_token_ids holds the model's end tokens too
    unless ignore_eos is set.
    """

    ref: RequestRef
    index: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A prefill worker's first token; num_cached_tokens of the prompt were not computed."""

    chunk: TokenChunk
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class HandoffDone:
    """Every row is with the decode worker; seconds that the prompt queued and computed."""

    num_bytes: int
    queue_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What placement needs to know of a worker."""

    role: str
    incarnation: int
    model: str
    model_digest: str
    max_model_len: int
    num_pool_tokens: int
    num_free_tokens: int
    num_running: int
    num_waiting: int
    max_num_seqs: int
    num_queued_prompt_tokens: int
