"""How a step's windows become tokens: what the target says of a drafter's guesses.

A window is a sequence's newest token and the drafts behind it; its k + 1 rows of logits say what
the target would draw after each. Every rank verifies, and every rank gets the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from kvbraid.engine.draft_drawing import CoupledDrawing, DraftDrawing
from kvbraid.engine.rank_state import RankSequence
from kvbraid.engine.sampler import SampleResult
from kvbraid.request import PositionLogprobs
from kvbraid.speculative.acceptance import accepted_length
from kvbraid.speculative.verify_budget import WidthRule, best_width

Window = tuple[RankSequence, tuple[int, ...]]
"""A sequence and the drafts that are verified behind its newest token."""


class Emitted(NamedTuple):
    """What a window gave. token_ids: one, and one more for each accepted draft; none where the
    first logits were not finite. logprobs: as many where they were asked for."""

    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]


class RowSampler(Protocol):
    """What verification asks of `kvbraid.engine.model_runner.ModelRunner`."""

    def sample(
        self,
        logits: Tensor,
        sequences: Sequence[RankSequence],
        assumed: Sequence[tuple[int, ...]],
    ) -> SampleResult:
        """The target's own token of each row of `logits`; equal on every rank."""
        ...


class Verification(Protocol):
    """A lossless way to verify. drawing: how drafts must be drawn for it; width_rule: how the
    verify width may be chosen."""

    @property
    def drawing(self) -> DraftDrawing: ...
    @property
    def width_rule(self) -> WidthRule: ...

    def verify(
        self, sampler: RowSampler, logits: Tensor, windows: Sequence[Window]
    ) -> list[Emitted]:
        """One entry a window, equal on every rank; all ranks call in lockstep.

        logits: float32 [N, V_local], this rank's shard; the rows of a window follow each other,
        one more than it has drafts. At least one window.
        """
        ...


class ExactMatch:
    """A draft is accepted where it equals the target's own sample, which is what is emitted. So
    nothing that a drafter says changes a token, and any drafter and any width will do."""

    drawing: DraftDrawing = CoupledDrawing()
    width_rule: WidthRule = staticmethod(best_width)

    def verify(
        self, sampler: RowSampler, logits: Tensor, windows: Sequence[Window]
    ) -> list[Emitted]:
        """See Verification."""
        sequences, assumed = window_rows(windows)
        result = sampler.sample(logits, sequences, assumed)
        samples, is_valid = result.token_ids.tolist(), result.is_valid.tolist()
        emitted, first = [], 0
        for _, drafts in windows:
            rows = range(first, first + len(drafts) + 1)
            first = rows.stop
            kept = rows[: emitted_rows(drafts, samples[rows.start :], is_valid[rows.start :])]
            entries = result.logprobs[kept.start : kept.stop]
            emitted.append(
                Emitted(
                    tuple(samples[row] for row in kept), tuple(e for e in entries if e is not None)
                )
            )
        return emitted


def window_rows(windows: Sequence[Window]) -> tuple[list[RankSequence], list[tuple[int, ...]]]:
    """Of each row of the windows' logits: whose it is, and the drafts that it takes as accepted."""
    sequences = [sequence for sequence, drafts in windows for _ in range(len(drafts) + 1)]
    return sequences, [drafts[:row] for _, drafts in windows for row in range(len(drafts) + 1)]


def emitted_rows(drafts: Sequence[int], samples: Sequence[int], is_valid: Sequence[bool]) -> int:
    """How many of a window's samples are emitted: those whose drafts before them all came true.

    samples[i] is the target's own token after drafts[:i]. The emitted token is always the
    target's sample, so nothing that a drafter says changes the output. Rows from the first one
    that is not valid on are never emitted: 0 where that is the first.
    """
    num_rows = len(drafts) + 1
    num_emitted = accepted_length(drafts, samples[:num_rows]) + 1
    return next((row for row in range(num_emitted) if not is_valid[row]), num_emitted)
