"""How close the workers' ranks on GPUs are to transformers on the same GPU.

python -m benchmarks.gpu_fidelity --model tests/assets/tiny-mla \
    --prompts tests/assets/reference/tiny-mla-greedy.jsonl --json benchmarks/results/x.json

float32: greedy tokens, up to near ties. bfloat16, teacher-forced along the float32 continuation:
the largest logit difference to transformers in bfloat16, against what transformers differs from
itself (batch of 1 against 8, sdpa against eager); and where the best token is another than in
float32, the gap between float32's two best logits in units of that noise. Ranks are real
processes, one a GPU, over NCCL.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import BenchmarkRow, write_report
from tools.engine_case import Case, Prompt
from tools.engine_world import EngineWorld
from tools.greedy_reference import Continuation, greedy_continuation, load_reference_model

NUM_PROMPTS = 8
NUM_TOKENS = 24
MOST_PROMPT_TOKENS = 200
NOISE_BAR = 2.0
GAP_BAR = 3.0

Prompts = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Reference:
    """transformers on this GPU: float32 continuations; bfloat16 logits [steps, vocab] of each
    prompt along them, and how far bfloat16 is from itself."""

    continuations: list[Continuation]
    bf16: list[Tensor]
    noise: float
    usual_noise: float
    """Median over prompts and steps, where `noise` is the largest."""

    @classmethod
    def of(cls, model: str, prompts: Prompts) -> Reference:
        """Run transformers four times."""
        whole = load_reference_model(model).cuda()
        continuations = [greedy_continuation(whole, prompt, NUM_TOKENS) for prompt in prompts]
        forced = [
            [*prompt, *found.token_ids[:-1]]
            for prompt, found in zip(prompts, continuations, strict=True)
        ]
        sdpa, eager = (
            load_reference_model(model, attention=kind, dtype=torch.bfloat16).cuda()
            for kind in ("sdpa", "eager")
        )
        alone = [_last_logits(sdpa, [sequence])[0] for sequence in forced]
        others = [
            [_last_logits(eager, [sequence])[0] for sequence in forced],
            _last_logits(sdpa, forced),
        ]
        noises = torch.cat([differences(alone, other) for other in others])
        return cls(continuations, alone, float(noises.max()), float(noises.median()))


@torch.inference_mode()
def _last_logits(model: Any, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """float32 CPU [NUM_TOKENS, vocab] of the last places of each sequence, run as one batch."""
    longest = max(len(sequence) for sequence in sequences)
    ids = torch.tensor([[0] * (longest - len(s)) + list(s) for s in sequences])
    mask = torch.tensor([[0] * (longest - len(s)) + [1] * len(s) for s in sequences])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids.cuda(), attention_mask=mask.cuda(), position_ids=positions.cuda()).logits
    return list(logits[:, -NUM_TOKENS:].float().cpu())


def differences(some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Largest absolute logit difference of every step of every prompt."""
    pairs = zip(some, others, strict=True)
    return torch.cat([(a - b).abs().amax(dim=-1) for a, b in pairs])


def read_prompts(path: Path) -> Prompts:
    """The longest of the prompts up to MOST_PROMPT_TOKENS."""
    rows = [json.loads(line)["prompt_ids"] for line in path.read_text().splitlines()]
    fitting = sorted((row for row in rows if len(row) <= MOST_PROMPT_TOKENS), key=len)
    return [tuple(row) for row in fitting[-NUM_PROMPTS:]]


def layouts() -> list[tuple[int, int, str]]:
    """(tp, dcp, exchange) that this machine has GPUs for."""
    two = [(2, 1, "a2a"), (2, 2, "a2a"), (2, 2, "fused")]
    return [(1, 1, "a2a")] + (two if torch.cuda.device_count() > 1 else [])


def float32_rows(
    name: str, world: EngineWorld, case: Case, prompts: Prompts, reference: Reference
) -> Iterator[BenchmarkRow]:
    """Greedy tokens, alone and in a batch."""
    asked = [Prompt(prompt, NUM_TOKENS) for prompt in prompts]
    outcome = world.run(case, [asked[:1], asked])
    expected = [reference.continuations[:1], reference.continuations]
    same = [
        continuation.agrees_with(tokens)
        for phase, found in zip(expected, outcome.tokens, strict=True)
        for continuation, tokens in zip(phase, found, strict=True)
    ]
    yield BenchmarkRow.equality(f"{name} float32: greedy tokens of transformers", all(same))
    comparable = [c.num_comparable for c in reference.continuations]
    worst = differences(
        [ours[:n] for ours, n in zip(outcome.logits, comparable, strict=True)],
        [c.logits[:n].cpu() for c, n in zip(reference.continuations, comparable, strict=True)],
    ).max()
    what = f"{name} float32: largest logit difference to transformers"
    yield BenchmarkRow(what, float(worst), 0.0, 0.0, None, True)


def bfloat16_rows(
    name: str, world: EngineWorld, case: Case, prompts: Prompts, reference: Reference
) -> Iterator[BenchmarkRow]:
    """Logits along the float32 continuation, alone and in a batch."""
    for how, size in (("alone", 1), ("batch of 8", NUM_PROMPTS)):
        ours: list[Tensor] = []
        for first in range(0, NUM_PROMPTS, size):
            asked = [
                Prompt(prompts[i], NUM_TOKENS, forced=tuple(reference.continuations[i].token_ids))
                for i in range(first, first + size)
            ]
            ours += world.run(case, [asked]).logits
        found = differences(ours, reference.bf16)
        for which, value, noise in (
            ("largest", float(found.max()), reference.noise),
            ("median", float(found.median()), reference.usual_noise),
        ):
            ratio = value / noise
            what = f"{name} bfloat16 {how}: {which} logit difference / transformers' own"
            yield BenchmarkRow(what, value, noise, ratio, NOISE_BAR, ratio <= NOISE_BAR)
        gap = widest_flipped_gap(ours, reference.continuations)
        ratio = gap / reference.noise
        what = f"{name} bfloat16 {how}: widest float32 gap of a token that differs / noise"
        yield BenchmarkRow(what, gap, reference.noise, ratio, GAP_BAR, ratio <= GAP_BAR)


def widest_flipped_gap(ours: Sequence[Tensor], continuations: Sequence[Continuation]) -> float:
    """Largest gap of float32's two best logits where ours has another best token; 0 if none."""
    gaps = [
        gap
        for logits, continuation in zip(ours, continuations, strict=True)
        for best, token_id, gap in zip(
            logits.argmax(-1).tolist(), continuation.token_ids, continuation.gaps, strict=True
        )
        if best != token_id
    ]
    return max(gaps, default=0.0)


def main() -> int:
    """Measure, print and write; exit code 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--prompts", required=True, type=Path, help="JSONL with prompt_ids")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    prompts = read_prompts(options.prompts)
    reference = Reference.of(options.model, prompts)
    rows: list[BenchmarkRow] = []
    for tp_size, dcp_size, exchange in layouts():
        name = f"{Path(options.model).name} ({tp_size},{dcp_size}) {exchange}"
        case = Case(exchange=exchange, kv_cache_tokens=8192, record_logits=True)
        for dtype, check in (("float32", float32_rows), ("bfloat16", bfloat16_rows)):
            with EngineWorld(
                options.model,
                tp_size=tp_size,
                dcp_size=dcp_size,
                communicator="nccl",
                device="cuda",
                dtype=dtype,
            ) as world:
                for row in check(name, world, case, prompts, reference):
                    rows.append(row)
                    sys.stdout.write(f"{row.case}: {row.ours:.4g} ({row.ratio:.3f}) {row.holds}\n")
    if options.json:
        write_report(options.json, "gpu_fidelity", rows)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
