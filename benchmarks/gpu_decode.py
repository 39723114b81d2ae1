"""Decode steps of a worker's engine on one GPU: CUDA graphs against eager launches.

python -m benchmarks.gpu_decode --json benchmarks/results/gpu_decode_h200.json \
    [--model FOLDER ...] [--drafter FOLDER]

Tokens a second of the whole step (schedule, launch, sample, commit) at batch 1, 8 and 64, bfloat16,
greedy; one rank process keeps the weights, pool and graphs are made anew for each case. Cases of a
repeat run one after the other; the median over the repeats counts, of each the median of its steps
after the first ones. Without --model: tiny-mla, and random weights in the shape of SmolLM2-135M.
With --drafter, a folder for the first model: tokens a second with fixed drafts as well.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from benchmarks.report import BenchmarkRow, write_report
from kvbraid.request import SamplingParams
from tools.engine_case import Case, Prompt
from tools.engine_world import EngineWorld

TINY_MLA = Path("tests/assets/tiny-mla")
BATCHES = (1, 8, 64)
PROMPT_TOKENS = 32
NUM_STEPS = 48
# Steps that may compile, capture or run beside prompts.
NUM_WARMUP = 8
MOST_TOKEN_ID = 1000
GREEDY = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)


def prompts(batch: int, num_tokens: int) -> list[Prompt]:
    """Fixed prompts of ordinary tokens, different from one another."""
    generator = random.Random(batch)
    return [
        Prompt(
            tuple(generator.randrange(100, MOST_TOKEN_ID) for _ in range(PROMPT_TOKENS)),
            num_tokens,
            GREEDY,
        )
        for _ in range(batch)
    ]


def tokens_per_second(world: EngineWorld, case: Case, batch: int) -> float:
    """Of the steps in which the whole batch decodes, without prompts."""
    num_tokens = (NUM_STEPS + NUM_WARMUP) * (1 + case.max_draft_tokens)
    steps = world.run(case, [prompts(batch, num_tokens)]).steps
    ends = [
        (after[0] - before[0], after[3])
        for before, after in pairwise(steps)
        if before[1] == after[1] == batch and not before[2] and not after[2]
    ][NUM_WARMUP:]
    if case.drafter:
        return sum(tokens for _, tokens in ends) / sum(seconds for seconds, _ in ends)
    return batch / statistics.median(seconds for seconds, _ in ends)


def rows_of(
    world: EngineWorld, name: str, drafter: str, batches: Sequence[int], repeats: int
) -> Iterator[BenchmarkRow]:
    """Graphs / eager for each batch, plain and with drafts."""
    for batch in batches:
        plain = Case(
            max_num_seqs=batch,
            kv_cache_tokens=batch * 1024,
            max_model_len=1024,
            page_size=64,
        )
        cases = {"": plain}
        if drafter:
            cases[", 3 drafts"] = replace(plain, drafter=drafter, max_draft_tokens=3)
        for what, case in cases.items():
            found: dict[str, list[float]] = {"always": [], "never": []}
            for repeat in range(repeats):
                for graphs in ("always", "never") if repeat % 2 else ("never", "always"):
                    found[graphs].append(
                        tokens_per_second(world, replace(case, cuda_graphs=graphs), batch)
                    )
            ours, peer = (statistics.median(found[graphs]) for graphs in ("always", "never"))
            ratio = ours / peer
            yield BenchmarkRow(
                f"{name}, batch {batch}{what}: graphs / eager (tokens/s)",
                ours,
                peer,
                ratio,
                1.0,
                ratio >= 1.0,
            )


def random_llama(folder: Path) -> Path:
    """Random weights in the shape of SmolLM2-135M."""
    import torch
    import transformers

    path = folder / "random-135m"
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def main() -> int:
    """Measure, print and write; exit code 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", type=Path, help="model folder")
    parser.add_argument("--drafter", default="", help="drafter folder for the first model")
    parser.add_argument("--batch", action="append", type=int, help="batch sizes [1, 8, 64]")
    parser.add_argument("--repeats", type=int, default=3, help="repeats [3]")
    parser.add_argument("--device", default="cuda", help="cpu tries the program out")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    rows: list[BenchmarkRow] = []
    with tempfile.TemporaryDirectory() as folder:
        models = options.model or [TINY_MLA, random_llama(Path(folder))]
        for number, model in enumerate(models):
            with EngineWorld(
                str(model), tp_size=1, dcp_size=1, device=options.device, dtype="bfloat16"
            ) as world:
                drafter = "" if number else options.drafter
                for row in rows_of(
                    world, model.name, drafter, options.batch or BATCHES, options.repeats
                ):
                    rows.append(row)
                    sys.stdout.write(
                        f"{row.case}: {row.ours:.0f} / {row.peer:.0f} = {row.ratio:.2f}\n"
                    )
                    sys.stdout.flush()
    if options.json:
        write_report(options.json, "gpu_decode", rows)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
