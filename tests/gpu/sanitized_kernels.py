"""Every kernel on small shapes, or those that are named, for compute-sanitizer:

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
    python -m tests.gpu.sanitized_kernels
compute-sanitizer --tool racecheck python -m tests.gpu.sanitized_kernels split_mla_fp8

Without caching every tensor is an allocation of its own, so that a read behind its end is seen.
Results are compared with nothing here: the tests do that. Decode cases stand under the kernel that
takes them on Hopper.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from attention.backends.triton_backend import TritonBackend
from tests.gpu import test_extend_on_gpu as extend
from tests.gpu import test_kv_rows_on_gpu as kv_rows
from tests.gpu import test_triton_attention as decode

BF16, FP32 = torch.bfloat16, torch.float32
PAGE_64, PAGE_16 = (64, 1), (16, 4)
ONE, CAUSAL, FULL = (1, "causal"), (2, "causal"), (5, "full")

# "long": programs go from one sequence's piece to another's.
DECODE = {
    "split_mla": [
        decode.Case("mla512", 16, BF16, 2, PAGE_64, ONE, "page", 0),
        decode.Case("mla512", 16, BF16, 2, PAGE_16, CAUSAL, "tiny", 1),
        decode.Case("mla512", 20, BF16, 1, PAGE_64, CAUSAL, "long", 0),
        decode.Case("mla64", 5, BF16, 3, (1, 1), CAUSAL, "tiny", 2),
    ],
    "split_mla_wide": [
        decode.Case("mla512", 128, BF16, 2, PAGE_64, CAUSAL, "page", 1),
        decode.Case("mla512", 32, BF16, 2, PAGE_64, FULL, "page", 0),
        decode.Case("mla512", 64, BF16, 1, PAGE_64, ONE, "long", 0),
        decode.Case("mla512", 128, BF16, 1, PAGE_64, CAUSAL, "long", 0),
    ],
    "split_mla_fp8": [
        decode.Case("mla512", 16, BF16, 2, PAGE_64, ONE, "page", 0, "per token"),
        decode.Case("mla512", 40, BF16, 1, PAGE_64, ONE, "long", 0, "per tensor"),
        decode.Case("mla512", 16, BF16, 1, PAGE_64, ONE, "long", 0, "per token"),
    ],
    "split_fp8": [
        decode.Case("mla512", 16, BF16, 2, PAGE_64, CAUSAL, "page", 0, "per token"),
        decode.Case("gqa128", 32, BF16, 2, PAGE_64, ONE, "page", 0, "per tensor"),
    ],
    "split_attention": [
        decode.Case("mla512", 16, FP32, 2, PAGE_16, CAUSAL, "tiny", 0),
        decode.Case("gqa128", 32, BF16, 2, PAGE_16, FULL, "page", 0),
        decode.Case("gqa64", 16, BF16, 2, PAGE_16, CAUSAL, "tiny", 0),
        decode.Case("mqa256", 5, BF16, 2, PAGE_64, ONE, "tiny", 0),
    ],
}
EXTEND = [
    extend.Case("gqa128", 16, BF16, "tiny", 0.3),
    extend.Case("gqa64", 9, FP32, "tiny", None),
    extend.Case("mla192", 5, BF16, "tiny", None),
    extend.Case("mla24", 16, BF16, "mixed", None),
]


def main() -> None:
    """Run the cases of the kernels that are named, or all; prints each before it starts."""
    runs: dict[str, Callable[[], None]] = {
        **{name: partial(run_decode, cases) for name, cases in DECODE.items()},
        "extend_attention": run_extend,
        "append_rows": run_append,
        "move_rows": run_move,
    }
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help=f"of {', '.join(runs)} [all]")
    names = parser.parse_args().kernels or list(runs)
    unknown = sorted(set(names) - set(runs))
    if unknown:
        parser.error(f"kernels {', '.join(unknown)} are not among {', '.join(runs)}")
    for name in names:
        runs[name]()
    torch.cuda.synchronize()
    sys.stderr.write(f"ran {', '.join(names)}\n")


def run_decode(cases: list[decode.Case]) -> None:
    for case in cases:
        announce(case)
        problem = decode.make_problem(case)
        for rank in range(case.dcp_size):
            decode.rank_result(case, problem, rank, TritonBackend())


def run_extend() -> None:
    for case in EXTEND:
        announce(case)
        problem = extend.Problem(case)
        problem.run(problem.kernel(TritonBackend()))


def run_append() -> None:
    for case in kv_rows.CASES.INTERPRETED[::4]:
        announce(case)
        kv_rows.CASES.append(case, kv_rows.DEVICE)


def run_move() -> None:
    for source, target in kv_rows.CASES.MOVES[::4]:
        announce(f"{source} to {target}")
        kv_rows.CASES.move(source, target, kv_rows.DEVICE)


def announce(case: object) -> None:
    torch.cuda.synchronize()
    sys.stderr.write(f"{time.strftime('%X')} {case}\n")


if __name__ == "__main__":
    main()
