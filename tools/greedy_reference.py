"""What transformers says greedily, with the gap between the two best logits at every step."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

# Where the two best logits are closer than this, either token is right.
NEAR_TIE = 4e-4


@dataclass(frozen=True, slots=True)
class Continuation:
    """Greedy tokens after a prompt, the logit gap of each and the logits [step, vocab]."""

    token_ids: list[int]
    gaps: list[float]
    logits: Tensor

    @property
    def num_comparable(self) -> int:
        """Tokens before the first near tie."""
        ties = (i for i, gap in enumerate(self.gaps) if gap < NEAR_TIE)
        return next(ties, len(self.gaps))

    def agrees_with(self, token_ids: Sequence[int]) -> bool:
        """Whether `token_ids` are the same up to the first near tie."""
        n = self.num_comparable
        return list(token_ids[:n]) == self.token_ids[:n]


def load_reference_model(
    path: str | Path, *, attention: str = "sdpa", dtype: torch.dtype = torch.float32
) -> Any:
    """transformers' own model of a folder, or of the one GGUF file in it.

    A GGUF checkpoint is rounded to bfloat16 first, as the project's reference outputs are.
    """
    path = Path(path)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    files = sorted(path.glob("*.gguf"))
    if files:
        options["gguf_file"] = files[0].name
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, **options)
    if files:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().to(dtype)
    return model.eval()


@torch.inference_mode()
def greedy_continuation(model: Any, prompt: Sequence[int], num_tokens: int) -> Continuation:
    """`num_tokens` greedy tokens, end tokens included like any other."""
    cache = {_cache_argument(model): transformers.DynamicCache(config=model.config)}
    inputs, rows = torch.tensor([list(prompt)], device=model.device), []
    for _ in range(num_tokens):
        logits = model(inputs, **cache).logits[0, -1]
        rows.append(logits)
        inputs = logits.argmax().view(1, 1)
    stacked = torch.stack(rows)
    best = stacked.topk(2).values
    return Continuation(stacked.argmax(-1).tolist(), (best[:, 0] - best[:, 1]).tolist(), stacked)


def _cache_argument(model: Any) -> str:
    """Renamed between transformers 5.17 and 5.24, and an unknown name is ignored."""
    names = inspect.signature(model.forward).parameters
    return next(name for name in ("cache", "past_key_values") if name in names)
