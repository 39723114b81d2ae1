"""Model runners that emit what they are told, and that keep their logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention.interface import Group
from kvbraid.engine.model_runner import ModelRunner
from kvbraid.engine.rank_state import RankSequence
from kvbraid.engine.sampler import SampleResult
from tools.engine_case import Forced


class ForcingRunner(ModelRunner):
    """Emits forced tokens instead of its own; drafts are accepted where they agree with those."""

    def __init__(self, runner: ModelRunner, forced: Forced) -> None:
        self.__dict__.update(runner.__dict__)
        self._forced = forced

    def sample(
        self,
        logits: Tensor,
        sequences: Sequence[RankSequence],
        assumed: Sequence[tuple[int, ...]],
    ) -> SampleResult:
        """As ModelRunner.sample."""
        result = super().sample(logits, sequences, assumed)
        token_ids = result.token_ids.clone()
        for i, (sequence, drafts) in enumerate(zip(sequences, assumed, strict=True)):
            num_prompt = sequence.sampling.num_prompt_tokens
            forced = self._forced.get(tuple(sequence.token_ids[:num_prompt]))
            if forced is not None:
                token_ids[i] = forced[len(sequence.token_ids) - num_prompt + len(drafts)]
        return result._replace(token_ids=token_ids)


class RecordingRunner(ForcingRunner):
    """Also keeps the whole logits row of every sampled token."""

    def __init__(self, runner: ModelRunner, group: Group, forced: Forced) -> None:
        super().__init__(runner, forced)
        self._group = group
        self.rows: dict[tuple[int, ...], list[Tensor]] = {}

    def sample(
        self,
        logits: Tensor,
        sequences: Sequence[RankSequence],
        assumed: Sequence[tuple[int, ...]],
    ) -> SampleResult:
        """As ModelRunner.sample."""
        size = -(-self.model.config.vocab_size // self._group.size)
        padded = logits.new_full((len(logits), size + 1), float("-inf"))
        padded[:, : logits.shape[1]] = logits
        shards = self._group.all_gather(padded)
        vocab = self.model.config.vocab_size
        widths = [
            (r + 1) * vocab // self._group.size - r * vocab // self._group.size
            for r in range(self._group.size)
        ]
        whole = torch.cat([s[:, :w] for s, w in zip(shards, widths, strict=True)], dim=1)
        for row, sequence in zip(whole, sequences, strict=True):
            prompt = tuple(sequence.token_ids[: sequence.sampling.num_prompt_tokens])
            self.rows.setdefault(prompt, []).append(row.float().cpu())
        return super().sample(logits, sequences, assumed)
