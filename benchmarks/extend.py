"""Prefill and extend attention on a GPU against FlashInfer and torch, side by side in one run.

python -m benchmarks.extend --json benchmarks/results/extend_h200.json
python -m benchmarks.extend --heads mla --batches "1 x 8K" "2K over" --peers flashinfer

The second measures what has one of these texts in its name. Rows are written after every shape, so
that a run that is cut off keeps what it has.

Times are microseconds a call, median of interleaved replays of CUDA graphs, plans excluded. Peers
get prefix and chunk already joined in memory, ours gets them apart. MLA starts at the latent: both
sides pay for the up-projection, FlashInfer also for joining keys with their rope part, as it needs.
`/ floor` rows compare with flops / matmul rate, measured at the start of the run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention.backends.base import ExtendKernel
from attention.backends.torch_backend import TorchBackend
from attention.backends.triton_backend import TritonBackend
from attention.interface import LatentExpansion
from attention.rows import ExtendRows
from benchmarks.report import BenchmarkRow, write_report

DEVICE = torch.device("cuda")
# Between two ways to compute the same in bf16, of the norm of all rows.
TOLERANCE = 1e-2

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Batch:
    """Prefix and chunk lengths."""

    name: str
    prefix_lens: tuple[int, ...]
    chunk_lens: tuple[int, ...]

    @property
    def rows(self) -> ExtendRows:
        """As backends plan them."""
        return ExtendRows(self.prefix_lens, self.chunk_lens)

    @property
    def totals(self) -> list[int]:
        """Keys of each sequence."""
        return [p + c for p, c in zip(self.prefix_lens, self.chunk_lens, strict=True)]

    @property
    def pairs(self) -> float:
        """(query, key) pairs that causal attention computes."""
        return sum(
            c * p + c * (c + 1) / 2 for p, c in zip(self.prefix_lens, self.chunk_lens, strict=True)
        )


@dataclass(frozen=True)
class Heads:
    """rank: 0 for GQA. key_width without rope."""

    name: str
    num_q_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    rank: int = 0
    rope: int = 0

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return (self.key_width + self.rope) ** -0.5

    @property
    def kv_index(self) -> tuple[int, ...]:
        """KV head of each query head in the cache; MLA caches one."""
        kept = 1 if self.rank else self.num_kv_heads
        return tuple(h * kept // self.num_q_heads for h in range(self.num_q_heads))

    def flops(self, batch: Batch) -> float:
        """Of attention and up-projection."""
        attention = 2 * batch.pairs * (self.key_width + self.rope + self.value_width)
        expansion = 2 * sum(batch.totals) * self.rank * (self.key_width + self.value_width)
        return self.num_q_heads * (attention + expansion)


BATCHES = (
    Batch("prefill 1 x 8K", (0,), (8 << 10,)),
    Batch("prefill 1 x 32K", (0,), (32 << 10,)),
    Batch("2K over 30K", (30 << 10,), (2 << 10,)),
    Batch("2K over 128K", (128 << 10,), (2 << 10,)),
    Batch("64 over 128K", (128 << 10,), (64,)),
    Batch("8 x 512 ragged", (0,) * 8, (512, 300, 724, 64, 960, 511, 1000, 25)),
)
HEADS = (
    Heads("gqa 32/8 heads of 128", 32, 8, 128, 128),
    Heads("gqa 9/3 heads of 64", 9, 3, 64, 64),
    Heads("mla 16 heads of 192/128", 16, 16, 128, 128, rank=512, rope=64),
)
HEADS_BY_NAME = {heads.name: heads for heads in HEADS}
BATCHES_BY_NAME = {batch.name: batch for batch in BATCHES}
TORCH_BACKEND, TORCH_FLASH, FLASHINFER = PEERS = ("torch backend", "torch flash", "flashinfer fa3")


class Problem:
    """Inputs: q [T, H, D]; keys and values, of MLA latents, of all sequences, prefixes first."""

    def __init__(self, heads: Heads, batch: Batch) -> None:
        self.heads, self.batch = heads, batch
        self.q = random(sum(batch.chunk_lens), heads.num_q_heads, heads.key_width + heads.rope)
        num_keys = sum(batch.totals)
        if heads.rank:
            self.key = random(num_keys, heads.rank + heads.rope)
            self.value = self.key
            self.expansion = LatentExpansion(
                random(heads.num_q_heads, heads.key_width, heads.rank) * heads.rank**-0.5,
                random(heads.num_q_heads, heads.rank, heads.value_width) * heads.rank**-0.5,
            )
        else:
            self.key = random(num_keys, heads.num_kv_heads, heads.key_width)
            self.value = random(num_keys, heads.num_kv_heads, heads.value_width)

    def planned(self, backend: TritonBackend | TorchBackend) -> Call:
        """A backend of ours, which takes prefix and chunk apart."""
        kernel = backend.plan_extend(
            self.batch.rows,
            kv_index=self.heads.kv_index,
            scale=self.heads.scale,
            device=DEVICE,
        )
        return self.call(kernel)

    def call(self, kernel: ExtendKernel) -> Call:
        """One layer's call."""
        prefix, chunk = self._apart(self.key)
        if self.heads.rank:
            return lambda: kernel.mla(self.q, chunk, prefix, self.expansion)
        prefix_value, chunk_value = self._apart(self.value)
        return lambda: kernel.gqa(self.q, chunk, chunk_value, prefix, prefix_value)

    def _apart(self, rows: Tensor) -> tuple[Tensor | None, Tensor]:
        parts = zip(rows.split(self.batch.totals), self.batch.prefix_lens, strict=True)
        pairs = [x.tensor_split([p]) for x, p in parts]
        prefix = torch.cat([prefix for prefix, _ in pairs])
        return prefix if len(prefix) else None, torch.cat([chunk for _, chunk in pairs])

    def flashinfer(self) -> Call:
        """Ragged prefill by FlashInfer's fa3."""
        import flashinfer

        heads = self.heads
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            torch.zeros(512 << 20, dtype=torch.uint8, device=DEVICE), "NHD", backend="fa3"
        )
        wrapper.plan(
            bounds(self.batch.chunk_lens),
            bounds(self.batch.totals),
            heads.num_q_heads,
            heads.num_kv_heads,
            heads.key_width + heads.rope,
            head_dim_vo=heads.value_width,
            causal=True,
            sm_scale=heads.scale,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        if not heads.rank:
            return lambda: wrapper.run(self.q, self.key, self.value)
        return lambda: wrapper.run(self.q, *self._expanded())

    def _expanded(self) -> tuple[Tensor, Tensor]:
        """Keys [n, H, dn + dr] and values of MLA."""
        heads = self.heads
        compressed = self.key[:, : heads.rank]
        key = self.key.new_empty(len(self.key), heads.num_q_heads, heads.key_width + heads.rope)
        nope = compressed @ self.expansion.w_kc.flatten(0, 1).t()
        key[..., : heads.key_width] = nope.view(len(key), heads.num_q_heads, -1)
        key[..., heads.key_width :] = self.key[:, None, heads.rank :]
        value = key.new_empty(len(key), heads.num_q_heads, heads.value_width)
        torch.bmm(
            compressed.expand(heads.num_q_heads, -1, -1),
            self.expansion.w_vc,
            out=value.transpose(0, 1),
        )
        return key, value

    def torch_flash(self) -> Call:
        """torch's flash attention on one sequence without a prefix."""
        q, key, value = (x.transpose(0, 1)[None] for x in (self.q, self.key, self.value))

        def call() -> Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = F.scaled_dot_product_attention(
                    q, key, value, is_causal=True, scale=self.heads.scale, enable_gqa=True
                )
            return out[0].transpose(0, 1)

        return call

    def peers(self) -> dict[str, Callable[[], Call]]:
        """What ours is compared with, to be planned."""
        found = {TORCH_BACKEND: lambda: self.planned(TorchBackend())}
        is_plain = len(self.batch.totals) == 1 and not sum(self.batch.prefix_lens)
        if is_plain and not self.heads.rank:
            found[TORCH_FLASH] = self.torch_flash
        if has_flashinfer():
            found[FLASHINFER] = self.flashinfer
        return found


def has_flashinfer() -> bool:
    """Whether FlashInfer is installed."""
    import importlib.util

    return importlib.util.find_spec("flashinfer") is not None


def bounds(lens: Sequence[int]) -> Tensor:
    """int32 [n + 1]: where each sequence starts."""
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=DEVICE)


def random(*shape: int) -> Tensor:
    """bf16 normal numbers; never zeros, on which a GPU is faster."""
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def event_us(run: Callable[[], object]) -> float:
    """Time of one call on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return 1000 * float(begin.elapsed_time(end))


def matmul_rate() -> float:
    """bf16 flops a microsecond of an 8192^3 product."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / statistics.median([event_us(lambda: a @ b) for _ in range(25)][5:])


def captured(call: Call) -> torch.cuda.CUDAGraph:
    """One call as a graph, replayed once."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    return graph


def replay_us(calls: dict[str, Call], repeats: int) -> dict[str, float]:
    """Median time of one call of each side."""
    graphs = {name: captured(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, graph in graphs.items():
            times[name].append(event_us(graph.replay))
    return {name: statistics.median(values) for name, values in times.items()}


def named(texts: Sequence[str], names: Iterable[str]) -> list[str]:
    """The names that contain one of `texts`; all without texts. Exits where a text is in none."""
    known = list(names)
    for text in texts:
        if not any(text in name for name in known):
            sys.exit(f"{text!r} is in none of: {'; '.join(known)}")
    return [name for name in known if not texts or any(text in name for text in texts)]


def checked_peers(problem: Problem, ours: Tensor, peers: Sequence[str]) -> dict[str, Call]:
    """Those of `peers` that run here and compute the same as ours; says which do not."""
    found = {}
    for name, plan in problem.peers().items():
        if name not in peers:
            continue
        try:
            call = plan()
            error = float((call().float() - ours.float()).norm() / ours.float().norm())
        except RuntimeError as failure:
            print(f"{name} does not run: {failure}", flush=True)
            continue
        if error <= TOLERANCE:
            found[name] = call
        else:
            print(f"{name} is left out: it differs from ours by {error:.1e}", flush=True)
    return found


def rows_of(
    heads: Heads, batch: Batch, rate: float, repeats: int, peers: Sequence[str]
) -> list[BenchmarkRow]:
    """One row a peer and one for the floor; nothing has a bar."""
    case = f"{heads.name}, {batch.name}"
    problem = Problem(heads, batch)
    ours_call = problem.planned(TritonBackend())
    calls = {"ours": ours_call, **checked_peers(problem, ours_call(), peers)}
    times = replay_us(calls, repeats)
    ours = times.pop("ours")
    times["floor"] = heads.flops(batch) / rate
    return [
        BenchmarkRow(f"{case}: / {name}", ours, time, ours / time, None, True)
        for name, time in times.items()
    ]


def main() -> None:
    """Print and, if asked, write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result file here")
    parser.add_argument("--repeats", type=int, default=11, help="replays of each graph")
    for option, names in (("heads", HEADS_BY_NAME), ("batches", BATCHES_BY_NAME), ("peers", PEERS)):
        accepted = "; ".join(names)
        parser.add_argument(f"--{option}", nargs="+", default=[], metavar="TEXT", help=accepted)
    options = parser.parse_args()
    heads_names = named(options.heads, HEADS_BY_NAME)
    batch_names = named(options.batches, BATCHES_BY_NAME)
    peers = named(options.peers, PEERS)
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")
    rate = matmul_rate()
    rows = [BenchmarkRow("bf16 matmul, TFLOP/s", rate / 1e6, 0.0, 0.0, None, True)]
    for heads in map(HEADS_BY_NAME.__getitem__, heads_names):
        for batch in map(BATCHES_BY_NAME.__getitem__, batch_names):
            torch.manual_seed(0)
            found = rows_of(heads, batch, rate, options.repeats, peers)
            for row in found:
                print(f"{row.case}: {row.ours:.1f} / {row.peer:.1f} = {row.ratio:.3f}", flush=True)
            rows += found
            if options.json:
                write_report(options.json, "extend", rows)


if __name__ == "__main__":
    main()
