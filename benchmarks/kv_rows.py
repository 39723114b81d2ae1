"""Moving KV rows on a GPU: the Triton mover against the torch mover on the same pool.

python -m benchmarks.kv_rows --json benchmarks/results/kv_rows_h200.json

Appends of 64 and 8192 tokens, gathers and scatters of 1024 positions in every layer. `graph` rows
are microseconds a call in replayed CUDA graphs, `eager` rows microseconds of the host to issue a
call. Plans and row ids are uploaded before; what a step pays for its plan is the last row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attention.backends.torch_rows import TorchRows
from attention.backends.triton_rows import TritonRows
from attention.kv_rows import Rotation, RowMover, RowStore
from attention.layout import StripeLayout
from benchmarks.report import BenchmarkRow, write_report

DEVICE = torch.device("cuda")
NUM_LAYERS, PAGE_SIZE, NUM_PAGES = 8, 64, 512
REPEATS, HOST_CALLS = 30, 200

Call = Callable[[int], object]


@dataclass(frozen=True)
class Rows:
    """What a pool stores and what comes in: widths of key and value, or of one latent."""

    name: str
    heads: int
    widths: tuple[int, ...]
    stored: torch.dtype = torch.bfloat16
    per_token: bool = False
    rotary: int = 0

    def stores(self) -> list[RowStore]:
        """A pool of zeros on the GPU."""
        shape = (NUM_LAYERS, NUM_PAGES * PAGE_SIZE, self.heads)
        scale = None
        if self.per_token:
            scale = torch.ones(NUM_LAYERS, NUM_PAGES, self.heads, PAGE_SIZE, device=DEVICE)
        return [
            RowStore(torch.zeros(*shape, width, device=DEVICE).to(self.stored), scale)
            for width in self.widths
        ]

    def step(self, num_tokens: int) -> tuple[list[Tensor], Rotation | None]:
        """bf16 rows of a step; a rotated latent comes with its rope key apart."""
        heads = (self.heads,) if len(self.widths) == 2 else ()
        widths = self.widths if heads or not self.rotary else (512, 64)
        rows = [
            torch.randn(num_tokens, *heads, width, device=DEVICE, dtype=torch.bfloat16)
            for width in widths
        ]
        if not self.rotary:
            return rows, None
        angles = torch.randn(num_tokens, self.rotary // 2, device=DEVICE)
        positions = torch.arange(num_tokens, device=DEVICE)
        return rows, Rotation(positions, angles.cos(), angles.sin())


KINDS = (
    Rows("MLA 576 bf16", 1, (576,)),
    Rows("MLA 576 bf16, rotated", 1, (576,), rotary=64),
    Rows("MLA 576 to fp8, scale a token", 1, (576,), torch.float8_e4m3fn, per_token=True),
    Rows("GQA 8 x 128 bf16", 8, (128, 128)),
    Rows("GQA 8 x 128 bf16, rotated", 8, (128, 128), rotary=128),
    Rows("GQA 8 x 128 to fp8", 8, (128, 128), torch.float8_e4m3fn),
)


def graph_us(call: Call) -> float:
    """Median device time of a call; a graph holds one call a layer."""
    for layer in range(NUM_LAYERS):
        call(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(NUM_LAYERS):
            call(layer)
    graph.replay()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / NUM_LAYERS)
    return statistics.median(times)


def host_us(call: Call) -> float:
    """Median time of the host to issue a call, the device's queue empty."""
    times = []
    for index in range(HOST_CALLS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(index % NUM_LAYERS)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def slots_of(num_tokens: int, stripe: StripeLayout) -> np.ndarray:
    """Decode-like slots: scattered over the pool, page 0 spared."""
    size = stripe.logical_page_size
    places = np.random.default_rng(0).permutation(NUM_PAGES * size - size)[:num_tokens]
    return places + size


def compare(name: str, ours: Call, peer: Call) -> list[BenchmarkRow]:
    """Device and host time of both, printed."""
    rows = []
    for how, measure in (("graph", graph_us), ("eager", host_us)):
        mine, theirs = measure(ours), measure(peer)
        rows.append(BenchmarkRow(f"{name}, {how}", mine, theirs, mine / theirs, None, True))
        print(f"{name}, {how}: {mine:.2f} us, torch {theirs:.2f} us, ratio {mine / theirs:.2f}")
        sys.stdout.flush()
    return rows


def appends(kind: Rows, dcp_size: int, num_tokens: int) -> list[BenchmarkRow]:
    """One append a layer."""
    stripe = StripeLayout(dcp_size, 0, PAGE_SIZE)
    stores = kind.stores()
    rows, rotation = kind.step(num_tokens)
    slots = slots_of(num_tokens, stripe)

    def call(mover: RowMover) -> Call:
        plan = mover.plan(slots)
        return lambda layer: mover.append(layer, plan, rows, rotation)

    name = f"append {num_tokens} tokens, {kind.name}, c = {dcp_size}"
    return compare(name, call(TritonRows(stores, stripe)), call(TorchRows(stores, stripe)))


def moves(kind: Rows, num_rows: int = 1024) -> list[BenchmarkRow]:
    """Gather and scatter of all layers, half of the heads where there are several."""
    stripe = StripeLayout(2, 0, PAGE_SIZE)
    stores = kind.stores()
    heads, layers = range(max(1, kind.heads // 2)), range(NUM_LAYERS)
    places = np.random.default_rng(1).permutation(NUM_PAGES * PAGE_SIZE)[:num_rows]
    rows = torch.tensor(places, device=DEVICE)
    movers: Sequence[RowMover] = (TritonRows(stores, stripe), TorchRows(stores, stripe))
    packed = movers[0].gather(rows, layers, heads)
    found = []
    for verb in ("gather", "scatter"):

        def call(mover: RowMover, verb: str = verb) -> Call:
            if verb == "gather":
                return lambda _: mover.gather(rows, layers, heads)
            return lambda _: mover.scatter(rows, layers, heads, packed)

        name = f"{verb} {num_rows} rows of {NUM_LAYERS} layers, {kind.name}"
        found += compare(name, *(call(mover) for mover in movers))
    return found


def plans(num_tokens: int = 64) -> BenchmarkRow:
    """A step's plan, filled into a captured one, against the torch mover's: filter and uploads."""
    stripe = StripeLayout(2, 0, PAGE_SIZE)
    stores = KINDS[0].stores()
    slots = slots_of(num_tokens, stripe)
    ours, peer = TritonRows(stores, stripe), TorchRows(stores, stripe)
    plan = ours.plan(slots)
    mine, theirs = host_us(lambda _: ours.refill(plan, slots)), host_us(lambda _: peer.plan(slots))
    print(f"plan of {num_tokens} tokens, host: {mine:.2f} us, torch {theirs:.2f} us")
    return BenchmarkRow(f"plan of {num_tokens} tokens", mine, theirs, mine / theirs, None, True)


def main() -> int:
    """Every case; nothing here has a bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for kind in KINDS:
        for dcp_size, num_tokens in ((1, 64), (2, 64), (1, 8192), (2, 8192)):
            rows += appends(kind, dcp_size, num_tokens)
    for kind in (KINDS[0], KINDS[3]):
        rows += moves(kind)
    rows.append(plans())
    if arguments.json:
        write_report(arguments.json, "kv_rows", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
