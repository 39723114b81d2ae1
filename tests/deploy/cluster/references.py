"""Prompts of tiny-mla with the greedy continuations that transformers computed."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

from tests.deploy.charts import ROOT

_FILE = ROOT / "tests/assets/reference/tiny-mla-greedy.jsonl"


@dataclass(frozen=True)
class Reference:
    """A prompt and what follows it."""

    prompt_ids: list[int]
    output_ids: list[int]


@functools.cache
def long_prompts() -> list[Reference]:
    """Those that a prefill worker computes, being too long for the decode worker's own hand."""
    rows = [json.loads(line) for line in _FILE.read_text(encoding="utf-8").splitlines()]
    found = [Reference(row["prompt_ids"], row["output_ids"]) for row in rows]
    return [r for r in found if len(r.prompt_ids) > 20]
