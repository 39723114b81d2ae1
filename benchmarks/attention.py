"""Decode attention on a GPU against FlashInfer, side by side in one run.

python -m benchmarks.attention --json benchmarks/results/attention_h200.json

Times are microseconds a call, median of interleaved replays of CUDA graphs, plans excluded. Both
sides read the same pages of 64 tokens in the same random order and return their LSE; the KV copies
that the calls of a graph rotate over fill at least four times the L2 cache. The MLA peer is
FlashInfer's fa3, the GQA peer the faster of its two paged decode paths. `/ floor` rows compare
with max(bytes / copy bandwidth, flops / matmul rate), both measured at the start of the run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from attention.backends.triton_backend import TritonBackend
from attention.interface import GQACache, MLACache
from attention.rows import DecodeRows
from benchmarks.report import BenchmarkRow, write_report

DEVICE = torch.device("cuda")
PAGE_SIZE = 64
RANK, ROPE = 512, 64
SHAPES = ((1, 16 << 10), (1, 128 << 10), (8, 128 << 10), (64, 8 << 10), (128, 4 << 10))
MLA_HEADS = (16, 32, 64, 128)
GQA_HEADS = ((32, 8, 128), (9, 3, 64))
VERIFY_BARS = {2: None, 4: 1.15, 8: 1.4}
FP8 = torch.float8_e4m3fn
FP8_SHAPES = ((8, 128 << 10), (64, 8 << 10))
FP8_BAR = 0.6

Call = Callable[[int], object]


@dataclass(frozen=True)
class Ceilings:
    """What this GPU reaches: bytes a microsecond (read + written), bf16 flops a microsecond."""

    copy: float
    matmul: float

    def floor_us(self, num_bytes: float, flops: float) -> float:
        """Least time for this much work."""
        return max(num_bytes / self.copy, flops / self.matmul)


@dataclass(frozen=True)
class Shape:
    """A batch of equal sequences."""

    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.length >> 10}K"

    @property
    def num_pages(self) -> int:
        """Pages of all sequences."""
        return self.batch * self.length // PAGE_SIZE

    def page_table(self) -> Tensor:
        """int32 CPU [B, pages of a sequence], pages in random order."""
        order = torch.randperm(self.num_pages, generator=torch.Generator().manual_seed(0))
        return order.view(self.batch, -1).to(torch.int32)

    def rows(self, window: int = 1) -> DecodeRows:
        """All keys in the pool; a verify window comes on top, in hand."""
        return DecodeRows(
            committed_lens=(self.length,) * self.batch,
            page_table=self.page_table(),
            page_size=PAGE_SIZE,
            window=window,
            window_mask="causal",
            has_window=window > 1,
            is_padding=(False,) * self.batch,
        )


def event_us(run: Callable[[], object]) -> float:
    """Time of one call on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return 1000 * float(begin.elapsed_time(end))


def measure_ceilings() -> Ceilings:
    """A 4 GiB copy and an 8192^3 bf16 product."""
    source = torch.randint(256, (4 << 30,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copy = statistics.median(event_us(lambda: target.copy_(source)) for _ in range(9))
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    product = statistics.median([event_us(lambda: a @ b) for _ in range(25)][5:])
    return Ceilings(2 * source.numel() / copy, 2 * 8192**3 / product)


def num_copies(num_bytes: int) -> int:
    """KV copies of this size to rotate over so that no call finds its keys in L2."""
    l2 = torch.cuda.get_device_properties(DEVICE).L2_cache_size
    return max(2, -(-4 * l2 // num_bytes))


def replay_us(calls: dict[str, Call], copies: int, repeats: int) -> dict[str, float]:
    """Median time of one call of each side. A call gets the index of its KV copy."""
    rounds = max(1, -(-8 // copies))
    graphs = {}
    for name, call in calls.items():
        for i in range(copies):
            call(i)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for i in range(rounds * copies):
                call(i % copies)
        graphs[name].replay()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, graph in graphs.items():
            times[name].append(event_us(graph.replay) / (rounds * copies))
    return {name: statistics.median(values) for name, values in times.items()}


def ours_mla(
    shape: Shape, num_heads: int, pools: Sequence[Tensor | MLACache], window: int = 1
) -> Call:
    """Decode, or verify with the window in hand."""
    kernel = TritonBackend().plan_decode(
        shape.rows(window),
        kv_index=(0,) * num_heads,
        scale=(RANK + ROPE) ** -0.5,
        value_width=RANK,
        device=DEVICE,
    )
    q = random(shape.batch * window, num_heads, RANK + ROPE)
    in_hand = random(shape.batch * window, RANK + ROPE) if window > 1 else None
    caches = [pool if isinstance(pool, MLACache) else MLACache(pool) for pool in pools]
    return lambda i: kernel.mla(q, caches[i], in_hand)


def flashinfer_mla(shape: Shape, num_heads: int, pools: Sequence[Tensor]) -> Call:
    """FlashInfer's fa3."""
    import flashinfer

    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace(), backend="fa3")
    table = shape.page_table()
    wrapper.plan(
        indptr(shape.batch, 1),
        indptr(shape.batch, table.shape[1]),
        table.flatten().to(DEVICE),
        torch.full((shape.batch,), shape.length, dtype=torch.int32, device=DEVICE),
        num_heads,
        RANK,
        ROPE,
        PAGE_SIZE,
        False,
        (RANK + ROPE) ** -0.5,
        torch.bfloat16,
        torch.bfloat16,
    )
    nope, rope = random(shape.batch, num_heads, RANK), random(shape.batch, num_heads, ROPE)
    return lambda i: wrapper.run(
        nope, rope, pools[i][..., :RANK], pools[i][..., RANK:], return_lse=True
    )


def ours_gqa(
    shape: Shape, num_heads: int, num_kv_heads: int, dim: int, pools: Sequence[GQACache]
) -> Call:
    """Decode."""
    kernel = TritonBackend().plan_decode(
        shape.rows(),
        kv_index=tuple(head * num_kv_heads // num_heads for head in range(num_heads)),
        scale=dim**-0.5,
        value_width=dim,
        device=DEVICE,
    )
    q = random(shape.batch, num_heads, dim)
    return lambda i: kernel.gqa(q, pools[i], None, None)


def flashinfer_gqa(
    shape: Shape,
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    pools: Sequence[GQACache],
    *,
    use_tensor_cores: bool,
) -> Call:
    """FlashInfer's paged decode."""
    import flashinfer

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), "NHD", use_tensor_cores=use_tensor_cores
    )
    table = shape.page_table()
    wrapper.plan(
        indptr(shape.batch, table.shape[1]),
        table.flatten().to(DEVICE),
        torch.full((shape.batch,), PAGE_SIZE, dtype=torch.int32, device=DEVICE),
        num_heads,
        num_kv_heads,
        dim,
        PAGE_SIZE,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    q = random(shape.batch, num_heads, dim)
    return lambda i: wrapper.run(q, (pools[i].key, pools[i].value), return_lse=True)


def random(*shape: int) -> Tensor:
    """bf16 normal numbers; never zeros, on which a GPU is faster."""
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def workspace() -> Tensor:
    """For a FlashInfer wrapper."""
    return torch.zeros(256 << 20, dtype=torch.uint8, device=DEVICE)


def indptr(num: int, step: int) -> Tensor:
    """int32 [num + 1]: 0, step, 2 * step, ..."""
    return step * torch.arange(num + 1, dtype=torch.int32, device=DEVICE)


def against(case: str, ours: float, peer: float, bar: float | None) -> BenchmarkRow:
    """ratio: ours / peer, at most `bar`."""
    ratio = ours / peer
    return BenchmarkRow(case, ours, peer, ratio, bar, bar is None or ratio <= bar)


def mla_rows(shape: Shape, ceilings: Ceilings, repeats: int) -> list[BenchmarkRow]:
    """Decode of every head count and, for the long single sequence, verify."""
    num_bytes = 2 * shape.num_pages * PAGE_SIZE * (RANK + ROPE)
    copies = num_copies(num_bytes)
    pools = [random(shape.num_pages, PAGE_SIZE, RANK + ROPE) for _ in range(copies)]
    rows = []
    for heads in MLA_HEADS:
        calls = {
            "ours": ours_mla(shape, heads, pools),
            "peer": flashinfer_mla(shape, heads, pools),
        }
        times = replay_us(calls, copies, repeats)
        flops = 2.0 * shape.batch * shape.length * heads * (2 * RANK + ROPE)
        floor = ceilings.floor_us(num_bytes, flops)
        case = f"mla {heads} heads, {shape}"
        bar = None if heads == 128 else 0.75 if shape.batch == 1 else 1.0
        rows.append(against(f"{case}: / flashinfer fa3", times["ours"], times["peer"], bar))
        rows.append(against(f"{case}: / floor", times["ours"], floor, None))
    if shape == Shape(1, 128 << 10):
        calls = {"1": ours_mla(shape, 16, pools)}
        calls |= {str(w): ours_mla(shape, 16, pools, w) for w in VERIFY_BARS}
        times = replay_us(calls, copies, repeats)
        for window, bar in VERIFY_BARS.items():
            case = f"mla 16 heads, {shape}: verify {window} / decode"
            rows.append(against(case, times[str(window)], times["1"], bar))
    return rows


def gqa_rows(
    shape: Shape, heads: tuple[int, int, int], ceilings: Ceilings, repeats: int
) -> list[BenchmarkRow]:
    """Decode against the faster of FlashInfer's two paths."""
    num_heads, num_kv_heads, dim = heads
    num_bytes = 4 * shape.num_pages * PAGE_SIZE * num_kv_heads * dim
    copies = num_copies(num_bytes)
    pools = [
        GQACache(*(random(shape.num_pages, PAGE_SIZE, num_kv_heads, dim) for _ in range(2)))
        for _ in range(copies)
    ]
    calls = {"ours": ours_gqa(shape, *heads, pools)}
    for path, use_tensor_cores in (("cuda cores", False), ("tensor cores", True)):
        calls[path] = flashinfer_gqa(shape, *heads, pools, use_tensor_cores=use_tensor_cores)
    times = replay_us(calls, copies, repeats)
    ours = times.pop("ours")
    best = min(times, key=times.__getitem__)
    flops = 4.0 * shape.batch * shape.length * num_heads * dim
    case = f"gqa {num_heads}/{num_kv_heads} heads of {dim}, {shape}"
    return [
        against(f"{case}: / flashinfer decode, {best}", ours, times[best], 1.0),
        against(f"{case}: / floor", ours, ceilings.floor_us(num_bytes, flops), None),
    ]


def fp8_rows(shape: Shape, repeats: int) -> list[BenchmarkRow]:
    """Decode over e4m3 pools, one scale or one a token, against the same over bf16 pools."""
    mla = (shape.num_pages, PAGE_SIZE, RANK + ROPE)
    heads = GQA_HEADS[0]
    gqa = (shape.num_pages, PAGE_SIZE, heads[1], heads[2])
    copies = num_copies(shape.num_pages * PAGE_SIZE * (RANK + ROPE))
    latents = [random(*mla) for _ in range(copies)]
    caches = [GQACache(random(*gqa), random(*gqa)) for _ in range(copies)]
    rows = []
    for kind, token_shape in (("one scale", None), ("a scale a token", True)):
        latent_scale = scales(mla[:2] if token_shape else (1,))
        gqa_scale = scales((gqa[0], gqa[2], gqa[1]) if token_shape else (1,))
        calls = {
            "mla 16 heads": ours_mla(shape, 16, latents),
            "mla 16 heads fp8": ours_mla(
                shape, 16, [MLACache(x.to(FP8), latent_scale) for x in latents]
            ),
            "gqa 32/8 heads of 128": ours_gqa(shape, *heads, caches),
            "gqa 32/8 heads of 128 fp8": ours_gqa(
                shape,
                *heads,
                [GQACache(c.key.to(FP8), c.value.to(FP8), gqa_scale, gqa_scale) for c in caches],
            ),
        }
        times = replay_us(calls, copies, repeats)
        for name in ("mla 16 heads", "gqa 32/8 heads of 128"):
            case = f"{name}, {shape}, fp8 KV, {kind}: / bf16 KV"
            rows.append(against(case, times[f"{name} fp8"], times[name], FP8_BAR))
    return rows


def scales(shape: tuple[int, ...]) -> Tensor:
    """float32, between 0.5 and 1.5."""
    return torch.rand(shape, device=DEVICE) + 0.5


def measure(repeats: int) -> list[BenchmarkRow]:
    """All rows, the ceilings first."""
    ceilings = measure_ceilings()
    rows = [
        BenchmarkRow("copy bandwidth, TB/s", ceilings.copy / 1e6, 0.0, 0.0, None, True),
        BenchmarkRow("bf16 matmul, TFLOP/s", ceilings.matmul / 1e6, 0.0, 0.0, None, True),
    ]
    for batch, length in SHAPES:
        rows += mla_rows(Shape(batch, length), ceilings, repeats)
    for batch, length in FP8_SHAPES:
        rows += fp8_rows(Shape(batch, length), repeats)
    for heads in GQA_HEADS:
        for batch, length in SHAPES:
            rows += gqa_rows(Shape(batch, length), heads, ceilings, repeats)
    return rows


def main() -> int:
    """Exit code 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result file here")
    parser.add_argument("--repeats", type=int, default=25, help="replays of each graph")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")
    rows = measure(options.repeats)
    for row in rows:
        bar = "" if row.bar is None else f" (bar {row.bar}: {'holds' if row.holds else 'MISSED'})"
        print(f"{row.case}: {row.ours:.2f} / {row.peer:.2f} = {row.ratio:.3f}{bar}")
    if options.json:
        write_report(options.json, "attention", rows)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
