"""What a target tells a drafter in one step, and what the drafter answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """How the target will draw the tokens that are drafted. A drafter that draws with the same
    noise agrees more often; one that does not is only slower.

    temperature: 0 is greedy. signed_key: the sequence's sampling key as a signed 64-bit number.
    wants_law: the proposal must say what law its drafts were drawn from (the ratio test's q). A
    drafter that cannot say leaves it out, and its drafts are not used then.
    """

    temperature: float = 0.0
    signed_key: int = 0
    wants_law: bool = False


@dataclass(frozen=True, slots=True)
class DraftTask:
    """One sequence in one step: commit, ingest, propose.

    key: names the sequence. rows: fused rows [m, d] of positions [first_position,
    first_position + m), m >= 0; they replace whatever the drafter holds from first_position on.
    next_token_ids: for each row the token at its position + 1. anchor_id: the newest token, at
    position first_position + m, whose own row does not exist yet; equal to next_token_ids[-1] when
    there are rows. num_wanted: drafts after the anchor, 0 to ingest only. starts_cold: rows before
    first_position are gone for good; without it a gap is answered with Resync.
    """

    key: str
    first_position: int
    rows: Tensor
    next_token_ids: tuple[int, ...]
    anchor_id: int
    num_wanted: int
    sampling: DraftSampling = DraftSampling()
    starts_cold: bool = False

    @property
    def anchor_position(self) -> int:
        """Position of the anchor: the number of rows that are committed."""
        return self.first_position + len(self.next_token_ids)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts of one sequence; may be fewer than wanted, also none.

    confidences: for each draft the drafter's own estimate that the target agrees, given that it
    agreed with those before; empty where the drafter has no such head. laws: float32 [k, V], the
    law that each draft was drawn from, given those before; None unless it was wanted.
    """

    token_ids: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    laws: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Resync:
    """The drafter holds rows up to `num_rows` only (0: none of this sequence): send from there."""

    num_rows: int


Answer = Proposal | Resync
