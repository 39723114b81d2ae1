"""Cross-checks, each step, what every rank must have equal: for hunting a rank that drifts away.

Ranks never exchange what they decide, because each decides the same. Where one does not, the
answer is wrong tokens or a collective that never ends, far from the cause. The guard stops the
worker at the first step in which two ranks differ, and says in what.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from attention.interface import Group
from kvbraid.engine.model_runner import WindowedDecode
from kvbraid.engine.rank_state import RankState
from kvbraid.engine.step_plan import Extend, StepPlan
from kvbraid.errors import KVBraidError

logger = logging.getLogger(__name__)

Int64Array = NDArray[np.int64]


class RankMismatchError(KVBraidError):
    """Ranks of this worker that must be equal are not; the whole worker has to end."""


class StepGuard(Protocol):
    """Looks at every step of one rank. Every rank of a worker calls it in lockstep."""

    def check_inputs(self, plan: StepPlan, decode: WindowedDecode) -> None:
        """Before the model runs, after the plan's operations: plan, window tokens, page tables.

        Raises RankMismatchError, on every rank, when the ranks differ.
        """
        ...

    def check_sampled(self, tokens: Mapping[int, Sequence[int]], invalid: Sequence[int]) -> None:
        """After sampling: new token ids by slot, and the slots that got none.

        Raises RankMismatchError, on every rank, when the ranks differ.
        """
        ...


class NoGuard:
    """Looks at nothing."""

    def check_inputs(self, plan: StepPlan, decode: WindowedDecode) -> None:
        """Does nothing."""

    def check_sampled(self, tokens: Mapping[int, Sequence[int]], invalid: Sequence[int]) -> None:
        """Does nothing."""


class DigestGuard:
    """Gathers 64-bit digests: three int64 a step before the model runs, one after it sampled."""

    def __init__(self, group: Group, state: RankState) -> None:
        """group: takes CPU tensors and has every rank of the worker."""
        self._group = group
        self._state = state
        self._step = 0

    def check_inputs(self, plan: StepPlan, decode: WindowedDecode) -> None:
        """See StepGuard. Before the model, so that a wrong shape never meets a collective."""
        self._step += 1
        slots = [s.slot for s in decode.sequences] + [e.slot for e in plan.extends]
        self._compare(
            {
                "step plan": plan.encode(),
                "token window": _words([*_windows(decode), *self._chunks(plan.extends)]),
                "page tables": _words([self._state.pages_of(slot).tolist() for slot in slots]),
            }
        )

    def check_sampled(self, tokens: Mapping[int, Sequence[int]], invalid: Sequence[int]) -> None:
        """See StepGuard."""
        pairs = [[slot, *token_ids] for slot, token_ids in tokens.items()]
        self._compare({"sampled ids": _words([*pairs, list(invalid)])})

    def _chunks(self, extends: Sequence[Extend]) -> list[list[int]]:
        """Slot, first position and token ids of each chunk."""
        return [
            [e.slot, e.start, *self._state[e.slot].token_ids[e.start : e.start + e.length]]
            for e in extends
        ]

    def _compare(self, parts: Mapping[str, Int64Array]) -> None:
        own = np.array([_digest(words) for words in parts.values()], dtype=np.int64)
        by_rank = self._group.all_gather(torch.from_numpy(own)).numpy()  # [size, len(parts)]
        for column, (name, words) in enumerate(parts.items()):
            others = np.flatnonzero(by_rank[:, column] != by_rank[0, column]).tolist()
            if others:
                logger.error("step %d, %s here: %s", self._step, name, words.tolist())
                digests = ", ".join(
                    f"{d & (1 << 64) - 1:016x}" for d in by_rank[:, column].tolist()
                )
                raise RankMismatchError(
                    f"step {self._step}: the {name} of rank {', '.join(map(str, others))} "
                    f"differs from rank 0's (digests in rank order: {digests})"
                )


def make_guard(is_wanted: bool, group: Group, state: RankState) -> StepGuard:
    """The guard of one rank; a worker of one rank has nothing to compare."""
    return DigestGuard(group, state) if is_wanted and group.size > 1 else NoGuard()


def _windows(decode: WindowedDecode) -> list[list[int]]:
    """Slot, length of what is attended to, first position and token ids of each decode window."""
    windows = []
    for sequence, drafts in zip(decode.sequences, decode.drafts, strict=True):
        newest = len(sequence.token_ids) - 1
        window = [sequence.token_ids[newest], *drafts]
        windows.append([sequence.slot, newest + decode.window, newest, *window])
    return windows


def _words(rows: Sequence[Sequence[int]]) -> Int64Array:
    """Rows one after the other, each behind its length."""
    return np.array([word for row in rows for word in (len(row), *row)], dtype=np.int64)


def _digest(words: Int64Array) -> int:
    return int.from_bytes(xxhash.xxh3_64_digest(words.tobytes()), "big", signed=True)
