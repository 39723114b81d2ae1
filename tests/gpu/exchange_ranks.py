"""Two ranks on two GPUs: every exchange against float64, eager and in graphs, and a whole layer.

Rank 0 spawns rank 1. Rank 0 prints one JSON object a line: {"case", "error", "errors"}; error is
null unless the case broke, errors are the largest of any step and rank. A case that hangs ends the
process: the cases after it are then missing.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from attention.backends.triton_backend import TritonBackend
from attention.dcp import DcpAttention
from attention.exchanges.a2a import A2AExchange
from attention.exchanges.ag_rs import AgRsExchange
from attention.exchanges.base import Exchange, ExchangeLimits
from attention.exchanges.fused import FusedExchange
from attention.interface import (
    DecodeBatch,
    GQACache,
    GQAGeometry,
    Group,
    MLACache,
    MLAGeometry,
    SplitResult,
)
from attention.layout import HeadLayout, StripeLayout, shard_range
from attention.single_group import SingleGroup
from benchmarks.split_partials import PartialsShape, merge_local, random_partials
from kvbraid.engine.communicator import make_groups
from kvbraid.engine.ranks import from_environment, spawn_ranks, start_run

SIZE = 2
STEPS = 1000
CASE_SECONDS = 100
SEED = 20261129
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Case:
    """What changes from step to step is below these bounds."""

    num_heads: int
    width: int
    dtype: torch.dtype
    window: int = 1
    max_batch: int = 6
    max_slots: int = 5
    steps: int = STEPS

    @property
    def head_splits(self) -> list[int]:
        return [len(shard_range(self.num_heads, rank, SIZE)) for rank in range(SIZE)]

    def shape(self, counts: tuple[int, ...]) -> PartialsShape:
        return PartialsShape(
            counts, self.window, self.num_heads, self.width, self.dtype, self.max_slots
        )

    def shapes(self, generator: random.Random) -> Iterator[PartialsShape]:
        """The same on every rank."""
        for _ in range(self.steps):
            batch = generator.choice([1, 2, self.max_batch])
            yield self.shape(tuple(generator.randint(0, self.max_slots) for _ in range(batch)))


CASES = {
    "mla 16 heads bf16": Case(16, 512, torch.bfloat16),
    "gqa 9 heads verify bf16": Case(9, 128, torch.bfloat16, window=3),
    "gqa 8 heads fp16": Case(8, 64, torch.float16),
    "one head fp32, a rank without": Case(1, 256, torch.float32),
    "mla 128 heads bf16, many rows": Case(
        128, 512, torch.bfloat16, max_batch=64, max_slots=2, steps=60
    ),
    "long sequences bf16": Case(16, 512, torch.bfloat16, max_batch=2, max_slots=150, steps=100),
}


class Errors:
    """Largest relative L2 error of a row and mean over steps of each exchange, on the GPU."""

    def __init__(self) -> None:
        self._worst: dict[str, Tensor] = {}

    def add(self, name: str, actual: Tensor, expected: Tensor) -> None:
        distance = (actual.double() - expected).norm(dim=-1)
        error = (distance / expected.norm(dim=-1).clamp(min=1e-9)).nan_to_num(1e9)
        worst = error.max() if error.numel() else error.new_zeros(())
        self._worst[name] = torch.maximum(self._worst.get(name, worst), worst)

    def largest(self, group: Group) -> dict[str, float]:
        """Of all ranks. Ends every kernel first."""
        torch.cuda.synchronize()
        names = sorted(self._worst)
        mine = torch.stack([self._worst[name] for name in names])
        return dict(zip(names, group.all_gather(mine).amax(0).tolist(), strict=True))


def exchanges_for(case: Case, group: Group) -> dict[str, Exchange]:
    fused = FusedExchange()
    limits = ExchangeLimits(case.max_batch * case.window, case.dtype, DEVICE)
    fused.allocate(limits, case.width, case.head_splits, group)
    return {"ag_rs": AgRsExchange(), "a2a": A2AExchange(), "fused": fused}


def combine_all(
    exchanges: dict[str, Exchange], splits: SplitResult, case: Case, group: Group
) -> dict[str, Tensor]:
    """Each exchange's output; fused first, because merging splits overwrites out."""
    fused = exchanges["fused"]
    assert isinstance(fused, FusedExchange)
    outs = {"fused": fused.combine_splits(splits, case.head_splits, group)}
    partial = merge_local(splits)
    for name in ("ag_rs", "a2a"):
        outs[name] = exchanges[name].combine(partial, case.head_splits, group)
    outs["fused of merged"] = fused.combine(partial, case.head_splits, group)
    return outs


def own(tensor: Tensor, case: Case, rank: int) -> Tensor:
    heads = shard_range(case.num_heads, rank, SIZE)
    return tensor[:, heads.start : heads.stop]


def eager(case: Case, group: Group) -> dict[str, float]:
    errors, exchanges = Errors(), exchanges_for(case, group)
    generator = torch.Generator(DEVICE).manual_seed(SEED)
    for shape in case.shapes(random.Random(SEED)):
        partials = random_partials(shape, SIZE, generator)
        outs = combine_all(exchanges, partials.splits[group.rank], case, group)
        for name, out in outs.items():
            errors.add(name, out, own(partials.expected, case, group.rank))
    return errors.largest(group)


class CapturedStep:
    """All exchanges in one graph over static buffers of a batch size."""

    def __init__(
        self, exchanges: dict[str, Exchange], case: Case, batch: int, group: Group
    ) -> None:
        largest = case.shape((case.max_slots,) * batch)
        generator = torch.Generator(DEVICE).manual_seed(SEED)
        self.splits = random_partials(largest, SIZE, generator).splits[group.rank]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            combine_all(exchanges, self.splits, case, group)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        group.barrier()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.outs = combine_all(exchanges, self.splits, case, group)
        torch.cuda.synchronize()
        group.barrier()

    def replay(self, splits: SplitResult) -> dict[str, Tensor]:
        """What is past the step's last slot becomes NaN."""
        for name in ("part_out", "part_lse"):
            getattr(self.splits, name).fill_(float("nan"))
        for mine, given in zip(self.splits[:5], splits[:5], strict=True):
            mine[: len(given)] = given
        self.graph.replay()
        return self.outs


def captured(case: Case, group: Group) -> dict[str, float]:
    errors, exchanges = Errors(), exchanges_for(case, group)
    batches = sorted({1, 2, case.max_batch}, reverse=True)
    graphs = {batch: CapturedStep(exchanges, case, batch, group) for batch in batches}
    generator = torch.Generator(DEVICE).manual_seed(SEED)
    for shape in case.shapes(random.Random(SEED)):
        partials = random_partials(shape, SIZE, generator)
        outs = graphs[len(shape.counts)].replay(partials.splits[group.rank])
        for name, out in outs.items():
            errors.add(name, out, own(partials.expected, case, group.rank))
    return errors.largest(group)


def unequal_speed(case: Case, group: Group) -> dict[str, float]:
    """One rank at a time is slow, by spinning on its GPU: the other comes a step ahead."""
    errors, exchanges = Errors(), exchanges_for(case, group)
    generator = torch.Generator(DEVICE).manual_seed(SEED)
    for step, shape in enumerate(replace(case, steps=200).shapes(random.Random(SEED))):
        partials = random_partials(shape, SIZE, generator)
        if step // 10 % SIZE == group.rank:
            torch.cuda._sleep(200_000)
        fused = exchanges["fused"]
        assert isinstance(fused, FusedExchange)
        for _ in range(3):
            out = fused.combine_splits(partials.splits[group.rank], case.head_splits, group)
            errors.add("fused", out, own(partials.expected, case, group.rank))
        errors.add("ag_rs", out, own(partials.expected, case, group.rank))
    return errors.largest(group)


@dataclass(frozen=True)
class Layer:
    """A decode layer: q from replicated weights or of own heads, attention, o_proj, all-reduce."""

    is_mla: bool
    exchange: str
    q_mode: str
    captured: bool
    num_heads: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def key_width(self) -> int:
        return 576 if self.is_mla else 128

    @property
    def width(self) -> int:
        return 512 if self.is_mla else 128


LENGTHS = ((1, 2, 4097, 0), (129, 64, 3, 900), (4000, 0, 1, 4100), (5, 6, 7, 8))
PAGE, MAX_LEN, HIDDEN = 16, 4352, 256


def attention_of(layer: Layer, rank: int, size: int, group: Group) -> DcpAttention:
    exchange: Exchange = {"ag_rs": AgRsExchange, "a2a": A2AExchange, "fused": FusedExchange}[
        layer.exchange
    ]()
    scale = layer.key_width**-0.5
    geometry = MLAGeometry(512, 128, 64, 128, scale) if layer.is_mla else GQAGeometry(128, scale)
    return DcpAttention(
        geometry=geometry,
        stripe=StripeLayout(size, rank, PAGE, 1),
        heads=HeadLayout(layer.num_heads, 1, size, rank, size),
        group=group,
        backend=TritonBackend(),
        exchange=exchange,
        q_mode=layer.q_mode,
        limits=ExchangeLimits(len(LENGTHS[0]), layer.dtype, DEVICE),
    )


class LayerRank:
    """The layer on one rank of `size`, or alone; `tokens` is [B, MAX_LEN, key width]."""

    def __init__(self, layer: Layer, tokens: Tensor, weights: tuple[Tensor, Tensor], group: Group):
        self.layer, self.group = layer, group
        rank, size = group.rank, group.size
        self.attention = attention_of(layer, rank, size, group)
        heads = shard_range(layer.num_heads, rank, size)
        self.own = slice(heads.start, heads.stop)
        self.w_q, self.w_o = weights
        batch = tokens.shape[0]
        stripe = tokens[:, rank::size]
        per_sequence = -(-MAX_LEN // (PAGE * size))
        pool = torch.full((batch, per_sequence * PAGE, layer.key_width), float("nan"))
        self.pool = pool.to(DEVICE, layer.dtype)
        self.pool[:, : stripe.shape[1]] = stripe
        self.pool = self.pool.view(batch * per_sequence, PAGE, layer.key_width)
        self.table = torch.arange(batch * per_sequence, dtype=torch.int32).view(batch, -1)
        self.run: Callable[[Tensor, tuple[int, ...]], Tensor] = self._eager
        if layer.captured and size > 1:
            self._capture(batch)
            self.run = self._replay

    def plan(self, lengths: tuple[int, ...], into=None):
        batch = DecodeBatch(torch.tensor(lengths, dtype=torch.int32), self.table)
        return self.attention.plan_decode(batch, DEVICE, into)

    def forward(self, x: Tensor, plan) -> Tensor:
        """x [B, HIDDEN] -> [B, HIDDEN]."""
        layer = self.layer
        w_q = self.w_q if layer.q_mode == "replicate" else self.w_q[:, self.own]
        q = torch.einsum("th,hnd->tnd", x, w_q)
        if layer.is_mla:
            q_latent, q_pe = q[..., :512].contiguous(), q[..., 512:].contiguous()
            out = self.attention.mla_decode(q_latent, q_pe, MLACache(self.pool), None, plan)
        else:
            pool = self.pool[:, :, None]
            out = self.attention.gqa_decode(q, GQACache(pool, pool), None, None, plan)
        hidden = torch.einsum("tnd,ndh->th", out.float(), self.w_o[self.own].float())
        return self.group.all_reduce(hidden)

    def _eager(self, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
        return self.forward(x, self.plan(lengths))

    def _capture(self, batch: int) -> None:
        self.buffers = self.attention.decode_buffers(
            batch_size=batch,
            max_len=MAX_LEN - 1,
            window=1,
            window_mask="causal",
            dtype=self.layer.dtype,
            kv_dtype=self.layer.dtype,
            device=DEVICE,
        )
        self.x = torch.zeros(batch, HIDDEN, device=DEVICE, dtype=self.layer.dtype)
        plan = self.plan(LENGTHS[0], self.buffers)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.forward(self.x, plan)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.group.barrier()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.out = self.forward(self.x, plan)
        torch.cuda.synchronize()
        self.group.barrier()

    def _replay(self, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
        self.plan(lengths, self.buffers)
        self.x.copy_(x)
        self.graph.replay()
        return self.out


def whole_layer(layer: Layer, group: Group) -> dict[str, float]:
    """Difference from the layer on one GPU, relative to the largest value of each row."""
    generator = torch.Generator(DEVICE).manual_seed(SEED)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*shape, device=DEVICE, generator=generator)
        return (scale * values).to(layer.dtype)

    tokens = normal(len(LENGTHS[0]), MAX_LEN - 8, layer.key_width)
    weights = (
        normal(HIDDEN, layer.num_heads, layer.key_width, scale=2 * HIDDEN**-0.5),
        normal(layer.num_heads, layer.width, HIDDEN, scale=0.05),
    )
    ranks = LayerRank(layer, tokens, weights, group)
    alone = LayerRank(layer, tokens, weights, SingleGroup())
    worst = 0.0
    for lengths in LENGTHS * 3:
        x = normal(len(lengths), HIDDEN)
        actual, expected = ranks.run(x, lengths), alone.run(x, lengths)
        difference = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)
        worst = max(worst, float(difference.nan_to_num(1e9).max()))
    return {"layer": worst}


def limits(group: Group) -> dict[str, float]:
    """More tokens than the memory holds are refused when planned."""
    layer = Layer(True, "fused", "replicate", captured=False)
    attention = attention_of(layer, group.rank, group.size, group)
    table = torch.zeros(5, 1, dtype=torch.int32)
    batch = DecodeBatch(torch.ones(5, dtype=torch.int32), table)
    with pytest.raises(ValueError, match="5 tokens is above the 4"):
        attention.plan_decode(batch, DEVICE)
    return {}


def all_cases() -> dict[str, Callable[[Group], dict[str, float]]]:
    """Name -> body."""
    cases: dict[str, Callable[[Group], dict[str, float]]] = {}
    for name, case in CASES.items():
        cases[f"eager: {name}"] = lambda group, case=case: eager(case, group)
        cases[f"graph: {name}"] = lambda group, case=case: captured(case, group)
    cases["unequal speed"] = lambda group: unequal_speed(CASES["mla 16 heads bf16"], group)
    for exchange in ("ag_rs", "a2a", "fused"):
        for is_mla, q_mode in ((True, "replicate"), (True, "gather"), (False, "gather")):
            for is_captured in (False, True):
                layer = Layer(is_mla, exchange, q_mode, is_captured)
                kind, way = "mla" if is_mla else "gqa", "graph" if is_captured else "eager"
                cases[f"layer: {kind} {exchange} {q_mode} {way}"] = lambda group, layer=layer: (
                    whole_layer(layer, group)
                )
    cases["limits"] = limits
    return cases


def main() -> int:
    context = from_environment()
    ranks = None
    if context is None:
        context = start_run(SIZE)
        ranks = spawn_ranks([sys.executable, *sys.argv], context)
    torch.cuda.set_device(context.local_rank)
    group = make_groups("nccl", context, tp_size=SIZE, dcp_size=SIZE).dcp
    wanted = sys.argv[1:]
    for name, body in all_cases().items():
        if wanted and not any(part in name for part in wanted):
            continue
        faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
        began, error, errors = time.perf_counter(), None, {}
        try:
            with torch.inference_mode():
                errors = body(group)
        except (AssertionError, RuntimeError, ValueError, TypeError, NotImplementedError):
            error = traceback.format_exc()
        if error is not None or context.rank == 0:
            seconds = round(time.perf_counter() - began, 1)
            line = {"case": name, "rank": context.rank, "error": error, "errors": errors}
            sys.stdout.write(json.dumps({**line, "seconds": seconds}) + "\n")
            sys.stdout.flush()
        group.barrier()
        # NCCL does not end while a graph with its collectives lives.
        gc.collect()
    torch.cuda.synchronize()
    torch.distributed.destroy_process_group()
    if ranks is not None:
        ranks.stop(grace_s=30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
