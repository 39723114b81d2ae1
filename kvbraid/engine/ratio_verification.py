"""The ratio test as a way to verify: drafts drawn from a known law q are accepted with min(1, p/q).

It accepts a few more sampled drafts in a hundred than exact match with coupled noise
(1 - TV(p, q) of them, which is the most that any test can). The law of what is emitted is the
target's all the same, but the tokens of a seed are no longer those of plain decoding: they depend
on where windows begin and end. Greedy sequences, whose laws are point masses, are verified by
exact match, which is the ratio test there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attention.interface import Group
from attention.layout import shard_range
from kvbraid.engine.draft_drawing import DraftDrawing, LawfulDrawing
from kvbraid.engine.logprobs import position_logprobs
from kvbraid.engine.rank_state import RankSequence
from kvbraid.engine.sampler import target_scores
from kvbraid.engine.sampling_state import build_rows
from kvbraid.engine.verification import Emitted, ExactMatch, RowSampler, Window, window_rows
from kvbraid.speculative.ratio_test import Chance, KeyedChance, verify_by_ratio
from kvbraid.speculative.verify_budget import WidthRule, causal_width

_NOTHING = -1


def keyed_chance(sequence: RankSequence) -> Chance:
    """Decisions that follow from the sequence's sampling key and positions alone."""
    return KeyedChance(sequence.sampling.signed_key)


class RatioTest:
    """See Verification. Rank 0, which has the drafter and so q, decides; the others are told."""

    width_rule: WidthRule = staticmethod(causal_width)

    def __init__(
        self,
        *,
        vocab_shard: range,
        vocab_size: int,
        group: Group,
        chance_of: Callable[[RankSequence], Chance] = keyed_chance,
    ) -> None:
        """vocab_shard: this rank's part of vocab_size tokens by `shard_range`."""
        self._vocab_shard = vocab_shard
        self._vocab_size = vocab_size
        self._group = group
        self._chance_of = chance_of
        self._match = ExactMatch()
        self._lawful = LawfulDrawing()

    @property
    def drawing(self) -> DraftDrawing:
        """See Verification: of use on rank 0 only."""
        return self._lawful

    def verify(
        self, sampler: RowSampler, logits: Tensor, windows: Sequence[Window]
    ) -> list[Emitted]:
        """See Verification. What is tested follows from the windows, so ranks agree about it."""
        is_tested = [bool(drafts) and not s.sampling.is_greedy for s, drafts in windows]
        rows, others = _part(logits, windows, [not tested for tested in is_tested])
        matched = iter(self._match.verify(sampler, rows, others) if others else ())
        rows, drawn = _part(logits, windows, is_tested)
        tested = iter(self._test(rows, drawn) if drawn else ())
        return [next(tested if is_one else matched) for is_one in is_tested]

    def _test(self, logits: Tensor, windows: Sequence[Window]) -> list[Emitted]:
        sequences, assumed = window_rows(windows)
        rows = build_rows(
            [s.sampling for s in sequences],
            positions=[len(s.token_ids) + len(a) for s, a in zip(sequences, assumed, strict=True)],
            assumed=assumed,
            vocab_shard=self._vocab_shard,
            device=logits.device,
        )
        start = self._vocab_shard.start
        scores = self._whole_rows(target_scores(logits, start, self._group, rows))
        decided = torch.full((len(scores),), _NOTHING, dtype=torch.int64)
        if self._group.rank == 0:
            self._decide(scores, windows, decided)
        told = self._group.broadcast(decided.to(logits.device), 0).cpu()
        logprobs = position_logprobs(
            logits, start, self._group, told, told != _NOTHING, rows.top_logprobs
        )
        emitted, first = [], 0
        for _, drafts in windows:
            span = slice(first, first + len(drafts) + 1)
            first = span.stop
            token_ids = tuple(t for t in told[span].tolist() if t != _NOTHING)
            entries = tuple(e for e in logprobs[span] if e is not None)
            emitted.append(Emitted(token_ids, entries))
        return emitted

    def _whole_rows(self, scores: Tensor) -> Tensor:
        """[N, V_local] of each rank -> [N, V]."""
        size = self._group.size
        widths = [len(shard_range(self._vocab_size, rank, size)) for rank in range(size)]
        padded = scores.new_full((len(scores), max(widths)), -torch.inf)
        padded[:, : scores.shape[1]] = scores
        shards = self._group.all_gather(padded)
        return torch.cat([s[:, :width] for s, width in zip(shards, widths, strict=True)], dim=1)

    def _decide(self, scores: Tensor, windows: Sequence[Window], decided: Tensor) -> None:
        first = 0
        for sequence, drafts in windows:
            rows = scores[first : first + len(drafts) + 1]
            token_ids = self._emitted(rows, sequence, drafts)
            decided[first : first + len(token_ids)] = torch.tensor(token_ids, dtype=torch.int64)
            first += len(rows)

    def _emitted(
        self, scores: Tensor, sequence: RankSequence, drafts: tuple[int, ...]
    ) -> list[int]:
        """One window's tokens; rows from the first on that is no law are not used."""
        q = self._lawful.laws.get(sequence.slot)
        num_tested = 0 if q is None else min(len(drafts), len(q))
        is_law = scores.amax(dim=1).isfinite().tolist()
        num_rows = next((row for row, is_good in enumerate(is_law) if not is_good), len(scores))
        if num_rows == 0:
            return []
        num_tested = min(num_tested, num_rows - 1)
        return verify_by_ratio(
            drafts[:num_tested],
            scores[: num_tested + 1].double().softmax(dim=1),
            q[:num_tested] if q is not None else None,
            first_position=len(sequence.token_ids),
            chance=self._chance_of(sequence),
        )


def _part(
    logits: Tensor, windows: Sequence[Window], is_chosen: Sequence[bool]
) -> tuple[Tensor, list[Window]]:
    """The chosen windows and their rows."""
    chosen = [w for w, is_one in zip(windows, is_chosen, strict=True) if is_one]
    if len(chosen) == len(windows):
        return logits, chosen
    rows = [
        is_one
        for (_, drafts), is_one in zip(windows, is_chosen, strict=True)
        for _ in range(len(drafts) + 1)
    ]
    return logits[torch.tensor(rows, device=logits.device)], chosen
