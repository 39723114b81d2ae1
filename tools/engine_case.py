"""What is run at the engine seam, and what it gave."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from kvbraid.engine.speculation import VerifiedWindow
from kvbraid.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, seed=0)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request at the engine seam.

    forced: what every step is made to emit whatever it sampled (teacher forcing), max_tokens of
    them.
    """

    token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    index: int = 0
    forced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """What a rebuild of pool, attention and engine may vary.

    drafter_forgets_at: drafting step, from 1, before which the drafter loses all its sequences.
    """

    page_size: int = 16
    interleave: int = 1
    exchange: str = "ag_rs"
    q_mode: str = "gather"
    chunk_tokens: int = 512
    batched_tokens: int = 2048
    kv_cache_tokens: int = 4096
    max_num_seqs: int = 16
    max_model_len: int = 2048
    record_logits: bool = False
    drafter: str = ""
    max_draft_tokens: int = 0
    draft_policy: str = "fixed"
    cuda_graphs: str = "auto"
    draft_verification: str = "exact_match"
    drafter_forgets_at: int = 0


Forced = dict[tuple[int, ...], tuple[int, ...]]
"""Continuations to force, by prompt."""


@dataclass(slots=True)
class Outcome:
    """What a case gave. tokens, cached: per phase, per prompt. rows: [tp, 2] finite pool rows and
    pool bytes after the last token. logits: float32 [step, vocab] per prompt of the last phase.
    windows: what each step with drafts verified. steps: (when it ended, sequences that decoded,
    prompt tokens, new tokens) of each."""

    tokens: list[list[list[int]]] = field(default_factory=list)
    cached: list[list[int]] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    num_preemptions: int = 0
    windows: list[list[VerifiedWindow]] = field(default_factory=list)
    steps: list[tuple[float, int, int, int]] = field(default_factory=list)
