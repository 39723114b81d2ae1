"""The slow exact loop: greedy verification of a proposer's drafts by transformers, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from kvbraid.speculative.proposal import DraftTask, Proposal
from kvbraid.speculative.proposer import Proposer
from kvbraid.speculative.tap_fusion import TapFusion


class Window(NamedTuple):
    """One verified window. accepted: drafts that were right. gap: smallest difference between the
    best and the second logit among its rows: below 1e-3 another order of sums may decide."""

    accepted: int
    gap: float


class TransformersTarget:
    """A target that can be asked again from any position; keys behind it are forgotten."""

    def __init__(self, path: Path, gguf_file: str | None = None) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            path, gguf_file=gguf_file, dtype=torch.float32
        ).eval()
        with torch.no_grad():
            for weight in self._model.parameters():
                # The drafters were made for the weights as bf16 has them.
                weight.copy_(weight.bfloat16())
        self._cache = DynamicCache()

    def restart(self) -> None:
        self._cache = DynamicCache()

    @torch.no_grad()
    def forward(
        self, token_ids: list[int], start: int, tap_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Logits [T, V] and taps [T, m, d_t] of tokens at positions start, start + 1, ..."""
        surplus = self._cache.get_seq_length() - start
        if surplus > 0:
            self._cache.crop(-surplus)
        out = self._model(
            torch.tensor([token_ids]),
            cache=self._cache,
            output_hidden_states=True,
            use_cache=True,
        )
        taps = [out.hidden_states[layer + 1][0] for layer in tap_layers]
        return out.logits[0], torch.stack(taps, 1)


def verified_windows(
    target: TransformersTarget,
    fusion: TapFusion,
    proposer: Proposer,
    prompt_ids: list[int],
    num_windows: int,
    num_drafts: int | None = None,
) -> list[Window]:
    """Accepted drafts of the first windows of a greedy continuation, stop tokens ignored.

    num_drafts: of each window, all that the proposer makes by default.
    """
    target.restart()
    tokens = list(prompt_ids)
    logits, taps = target.forward(tokens, 0, fusion.tap_layers)
    first, rows = 0, fusion.fuse(taps)
    tokens.append(int(logits[-1].argmax()))
    windows = []
    while len(windows) < num_windows:
        anchor = len(tokens) - 1
        num_wanted = proposer.max_draft_tokens if num_drafts is None else num_drafts
        task = DraftTask("a", first, rows, tuple(tokens[first + 1 :]), tokens[-1], num_wanted)
        (proposal,) = proposer.step([task])
        assert isinstance(proposal, Proposal)
        assert len(proposal.token_ids) == num_wanted
        logits, taps = target.forward([tokens[-1], *proposal.token_ids], anchor, fusion.tap_layers)
        best = logits.topk(2, dim=-1)
        samples = best.indices[:, 0].tolist()
        drafts = [*proposal.token_ids, -1]
        accepted = next(i for i, sample in enumerate(samples) if drafts[i] != sample)
        gap = float((best.values[:, 0] - best.values[:, 1])[: accepted + 1].min())
        windows.append(Window(accepted, gap))
        tokens += samples[: accepted + 1]
        first, rows = anchor, fusion.fuse(taps[: accepted + 1])
    return windows
