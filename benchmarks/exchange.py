"""Exchanges of partial attention results between two GPUs, and what DCP 2 gains for a whole layer.

python -m benchmarks.exchange --json benchmarks/results/exchange_h200.json

Two ranks, one a GPU; rank 0 spawns rank 1. Times are microseconds a call, the slower rank's median
over interleaved replays of CUDA graphs of many calls. Each exchange starts from a rank's local
split partials and ends with the merged own heads: ag_rs and a2a first merge the splits with the
triton backend's kernel. Payload: bytes of outputs in the model dtype that a rank sends.

The layer is absorbed MLA decode over 128K tokens with replicated q: split kernel and exchange.
DCP 2 keeps half of the tokens on each GPU, TP 2 all tokens but half of the heads; both are compared
with the same KV and all heads on one GPU. KV copies are rotated over so that none is found in L2.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from attention.backends.triton_backend import TritonBackend
from attention.backends.triton_decode import TritonDecodeKernel
from attention.exchanges.a2a import A2AExchange
from attention.exchanges.ag_rs import AgRsExchange
from attention.exchanges.base import ExchangeLimits
from attention.exchanges.fused import FusedExchange
from attention.interface import Group, MLACache
from benchmarks.attention import RANK, ROPE, Shape, num_copies, random
from benchmarks.report import BenchmarkRow, write_report
from benchmarks.split_partials import PartialsShape, merge_local, random_partials
from kvbraid.engine.communicator import make_groups
from kvbraid.engine.ranks import from_environment, spawn_ranks, start_run

SIZE = 2
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
WIDTHS = (512, 128)
HEADS = (16, 32, 64, 128)
BATCHES = (1, 4, 16, 64)
LAYER_HEADS = (16, 128)
LAYER_BATCHES = (1, 8, 32)
LAYER_LENGTH = 128 << 10
CALLS = 40
LIMIT_S = 280
MIB = 1 << 20
# Programs that share the keys of a block of 64 rows on an H200: what a long sequence is cut into.
PROGRAMS, ROWS_PER_PROGRAM = 132, 64

Call = Callable[[int], object]


@dataclass(frozen=True)
class Options:
    """What is measured."""

    widths: tuple[int, ...] = WIDTHS
    heads: tuple[int, ...] = HEADS
    batches: tuple[int, ...] = BATCHES
    layer_batches: tuple[int, ...] = LAYER_BATCHES
    repeats: int = 11


QUICK = Options(heads=(16, 128), batches=(1, 64), layer_batches=(1, 8), repeats=5)


def replay_us(
    calls: dict[str, Call], group: Group, *, repeats: int, num_calls: int, copies: int = 1
) -> dict[str, float]:
    """Median time of one call of each kind, of the slower rank. A call gets its copy's index."""
    graphs = {}
    for name, call in calls.items():
        for i in range(copies):
            call(i)
        torch.cuda.synchronize()
        group.barrier()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], capture_error_mode="thread_local"):
            for i in range(num_calls):
                call(i % copies)
        group.barrier()
        graphs[name].replay()
    times: dict[str, list[float]] = {name: [] for name in calls}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(repeats):
        for name, graph in graphs.items():
            torch.cuda.synchronize()
            group.barrier()
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(1000 * begin.elapsed_time(end) / num_calls)
    medians = torch.tensor([statistics.median(values) for values in times.values()], device=DEVICE)
    slowest = group.all_gather(medians).amax(0).tolist()
    return dict(zip(calls, slowest, strict=True))


def ratio_row(case: str, ours: float, peer: float, bar: float | None) -> BenchmarkRow:
    """ratio: ours / peer, at most `bar`."""
    return BenchmarkRow(case, ours, peer, ours / peer, bar, bar is None or ours / peer <= bar)


def speedup_row(case: str, ours: float, one_gpu: float, bar: float | None) -> BenchmarkRow:
    """ratio: one GPU's time / ours, at least `bar`."""
    ratio = one_gpu / ours
    return BenchmarkRow(case, ours, one_gpu, ratio, bar, bar is None or ratio >= bar)


def exchange_rows(heads: int, width: int, group: Group, options: Options) -> Iterator[BenchmarkRow]:
    """Every batch size."""
    splits = [heads // SIZE] * SIZE
    fused, a2a, ag_rs = FusedExchange(), A2AExchange(), AgRsExchange()
    fused.allocate(ExchangeLimits(max(options.batches), DTYPE, DEVICE), width, splits, group)
    for batch in options.batches:
        slots = PROGRAMS // -(-heads // ROWS_PER_PROGRAM) // batch
        counts = (slots if slots > 1 else 0,) * batch
        shape = PartialsShape(counts, 1, heads, width, DTYPE, counts[0])
        generator = torch.Generator(DEVICE).manual_seed(group.rank)
        mine = random_partials(shape, 1, generator, empty_share=0.0).splits[0]
        calls: dict[str, Call] = {
            "fused": lambda i, mine=mine: fused.combine_splits(mine, splits, group),
            "a2a": lambda i, mine=mine: a2a.combine(merge_local(mine), splits, group),
            "ag_rs": lambda i, mine=mine: ag_rs.combine(merge_local(mine), splits, group),
        }
        times = replay_us(calls, group, repeats=options.repeats, num_calls=CALLS)
        payload = batch * (heads // SIZE) * width * DTYPE.itemsize * (SIZE - 1)
        case = f"{heads} heads of {width}, batch {batch}, {counts[0]} splits, {payload >> 10} KiB"
        bar = 0.7 if payload <= MIB else 1.0
        yield ratio_row(f"{case}: fused / a2a", times["fused"], times["a2a"], bar)
        yield ratio_row(f"{case}: fused / ag_rs", times["fused"], times["ag_rs"], None)
        yield ratio_row(f"{case}: a2a / ag_rs", times["a2a"], times["ag_rs"], None)


def mla_kernel(batch: int, length: int, heads: int) -> TritonDecodeKernel:
    """A planned step of equal sequences."""
    kernel = TritonBackend().plan_decode(
        Shape(batch, length).rows(),
        kv_index=(0,) * heads,
        scale=(RANK + ROPE) ** -0.5,
        value_width=RANK,
        device=DEVICE,
    )
    assert isinstance(kernel, TritonDecodeKernel)
    return kernel


def layer_calls(batch: int, heads: int, pools: list[Tensor], group: Group) -> dict[str, Call]:
    """One GPU, TP 2, and DCP 2 with two exchanges. A stripe is the first half of a pool's pages."""
    q = random(batch, heads, RANK + ROPE)
    own_q = q[:, : heads // SIZE].contiguous()
    splits = [heads // SIZE] * SIZE
    fused, a2a = FusedExchange(), A2AExchange()
    fused.allocate(ExchangeLimits(batch, DTYPE, DEVICE), RANK, splits, group)
    whole = mla_kernel(batch, LAYER_LENGTH, heads)
    own_heads = mla_kernel(batch, LAYER_LENGTH, heads // SIZE)
    stripe = mla_kernel(batch, LAYER_LENGTH // SIZE, heads)
    stripes = [MLACache(pool[: len(pool) // SIZE]) for pool in pools]
    return {
        "one GPU": lambda i: whole.mla(q, MLACache(pools[i]), None),
        "tp 2": lambda i: own_heads.mla(own_q, MLACache(pools[i]), None),
        "dcp 2 fused": lambda i: fused.combine_splits(
            stripe.mla_splits(q, stripes[i], None), splits, group
        ),
        "dcp 2 a2a": lambda i: a2a.combine(stripe.mla(q, stripes[i], None), splits, group),
    }


def layer_rows(batch: int, group: Group, options: Options) -> Iterator[BenchmarkRow]:
    """Every head count; bars for DCP 2 with the fused exchange."""
    shape = Shape(batch, LAYER_LENGTH)
    num_bytes = 2 * batch * LAYER_LENGTH * (RANK + ROPE)
    # A stripe is half as large: as many copies as it needs.
    copies = num_copies(num_bytes // SIZE)
    pools = [random(shape.num_pages, 64, RANK + ROPE) for _ in range(copies)]
    for heads in LAYER_HEADS:
        calls = layer_calls(batch, heads, pools, group)
        rounds = max(1, 8 // copies)
        times = replay_us(
            calls, group, repeats=options.repeats, num_calls=rounds * copies, copies=copies
        )
        one_gpu = times.pop("one GPU")
        for name, time_us in times.items():
            bar = None if name != "dcp 2 fused" else 1.2 if batch == 1 else 1.6
            case = f"layer mla {heads} heads, {batch} x {LAYER_LENGTH >> 10}K: one GPU / {name}"
            yield speedup_row(case, time_us, one_gpu, bar)


def measure(group: Group, options: Options) -> Iterator[BenchmarkRow]:
    """All rows."""
    for batch in options.layer_batches:
        yield from layer_rows(batch, group, options)
    for width in options.widths:
        for heads in options.heads:
            yield from exchange_rows(heads, width, group, options)


def report(row: BenchmarkRow, began: float) -> None:
    """One line."""
    bar = "" if row.bar is None else f" (bar {row.bar}: {'holds' if row.holds else 'MISSED'})"
    seconds = time.perf_counter() - began
    values = f"{row.ours:.1f} us, {row.peer:.1f} us: {row.ratio:.3f}"
    print(f"[{seconds:5.0f} s] {row.case}: {values}{bar}", flush=True)


def main() -> int:
    """Exit code 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result file here")
    parser.add_argument("--quick", action="store_true", help="the corners of the grid only")
    arguments = parser.parse_args()
    if torch.cuda.device_count() < SIZE:
        sys.exit("this benchmark needs two CUDA GPUs")
    began = time.perf_counter()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    context = from_environment()
    ranks = None
    if context is None:
        context = start_run(SIZE)
        argv = [sys.executable, "-m", "benchmarks.exchange", *sys.argv[1:]]
        ranks = spawn_ranks(argv, context)
    torch.cuda.set_device(context.local_rank)
    group = make_groups("nccl", context, tp_size=SIZE, dcp_size=SIZE).dcp
    rows: list[BenchmarkRow] = []
    for row in measure(group, QUICK if arguments.quick else Options()):
        rows.append(row)
        if ranks is not None:
            report(row, began)
    if ranks is not None and arguments.json:
        write_report(arguments.json, "exchange", rows)
    # NCCL does not end while a graph with its collectives lives.
    gc.collect()
    torch.cuda.synchronize()
    torch.distributed.destroy_process_group()
    if ranks is None:
        return 0
    ranks.stop(grace_s=30)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
