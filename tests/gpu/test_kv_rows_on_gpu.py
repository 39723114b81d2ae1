"""The Triton row mover on a GPU: the interpreter's cases, full-size rows, pools, graphs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.kv_rows import Rotation
from attention.layout import StripeLayout
from kvbraid.kv.page_pool import KvSpec, StripedPagePool
from kvbraid.kv.slots import LogicalSlots, slots_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU"),
]

PROGRAM = Path(__file__).parents[1] / "unit" / "kv" / "row_mover_cases.py"
DEVICE = torch.device("cuda")
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")


def load_cases() -> ModuleType:
    spec = importlib.util.spec_from_file_location("row_mover_cases", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
CASES = load_cases()
MLA = {"widths": (512, 64)}
GQA = {"widths": (128, 128), "heads": 8}
FULL_SIZE = [
    *(
        CASES.Case(kind, c, p, i, source=source, stored=stored, **sizes)
        for stored in DTYPES
        for source in sorted({"bfloat16", "float32" if stored == "float8_e4m3fn" else stored})
        for kind, sizes in (("mla", MLA), ("gqa", GQA))
        for c, p, i in ((1, 64, 1), (3, 16, 1), (2, 16, 16))
    ),
    *(
        CASES.Case(kind, 2, 16, source="bfloat16", stored=stored, rotary=r, gptj=gptj, **sizes)
        for stored in DTYPES
        for kind, r, sizes in (("mla_split", 64, MLA), ("gqa", 128, GQA), ("gqa", 32, GQA))
        for gptj in (False, True)
    ),
    *(
        CASES.Case(kind, c, 16, stored="float8_e4m3fn", source="bfloat16", scale=scale, **sizes)
        for scale in ("per_tensor", "per_token")
        for kind, sizes in (("mla", MLA), ("mla_split", MLA | {"rotary": 64}), ("gqa", GQA))
        for c in (1, 2)
    ),
]
FULL_SIZE_MOVES = [
    (
        CASES.Case(kind, 2, 16, 4, stored=stored, **sizes),
        CASES.Case(kind, 3, 4, 1, stored=stored, **sizes),
    )
    for stored in DTYPES
    for kind, sizes in (("mla", MLA), ("gqa", GQA))
]


@pytest.mark.parametrize("case", [*CASES.INTERPRETED, *FULL_SIZE], ids=str)
def test_append_writes_own_rows_and_nothing_else(case: object) -> None:
    result = CASES.append(case, DEVICE)
    assert result["untouched"], result
    assert result["each_token_once"], result
    assert result["error"] <= 1, result
    assert result["same_as_torch"], result


@pytest.mark.parametrize(("source", "target"), [*CASES.MOVES, *FULL_SIZE_MOVES], ids=str)
def test_rows_survive_a_handoff_between_other_layouts(source: object, target: object) -> None:
    result = CASES.move(source, target, DEVICE)
    assert result == {"same_as_torch": True, "untouched": True, "arrived": True}


def test_ids_that_no_rank_may_write() -> None:
    assert CASES.append_twice_filtered(DEVICE) == [2]
    assert CASES.negative_slots(DEVICE)
    assert CASES.append(CASES.INTERPRETED[0], DEVICE, slots_in="int32")["same_as_torch"]


def spec_of(kind: str, dtype: torch.dtype, scale_mode: str = "none") -> KvSpec:
    if kind == "mla":
        return KvSpec("mla", 2, 1, 576, 0, dtype, scale_mode)
    return KvSpec("gqa", 2, 8, 128, 128, dtype, scale_mode)


def step(spec: KvSpec, num_tokens: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (spec.num_heads,) if spec.kind == "gqa" else ()
    return [torch.randn(num_tokens, *heads, w, generator=generator) for w in spec.widths]


def pools(
    spec: KvSpec, stripe: StripeLayout, num_pages: int
) -> tuple[StripedPagePool, StripedPagePool]:
    """The same pool on the GPU and, by torch, on the CPU; all NaN."""
    both = [StripedPagePool(spec, num_pages, stripe, device) for device in (DEVICE, "cpu")]
    for pool in both:
        pool.fill_nan()
        if spec.scale_mode == "per_tensor":
            for layer in range(spec.num_layers):
                pool.set_scales(layer, *(0.02 * (1 + layer + i) for i in range(len(spec.widths))))
    return both[0], both[1]


def assert_equal_bits(gpu: StripedPagePool, cpu: StripedPagePool, *, without_sink: bool) -> None:
    """Every page and scale of every layer; page 0 of padded steps may differ."""
    for layer in range(gpu.spec.num_layers):
        for a, b in zip(gpu.layer(layer), cpu.layer(layer), strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                first = int(without_sink and len(b) == cpu.num_pages)
                assert torch.equal(
                    a.cpu()[first:].contiguous().view(torch.uint8),
                    b[first:].contiguous().view(torch.uint8),
                )


@pytest.mark.parametrize("scale_mode", ["none", "per_tensor", "per_token"])
@pytest.mark.parametrize("kind", ["mla", "gqa"])
@pytest.mark.parametrize("interleave", [1, 16])
def test_eight_ranks_write_every_token_exactly_once(
    kind: str, interleave: int, scale_mode: str
) -> None:
    num_tokens = 5000
    dtype = torch.bfloat16 if scale_mode == "none" else torch.float8_e4m3fn
    spec = spec_of(kind, dtype, scale_mode)
    rows = step(spec, num_tokens)
    order = np.random.default_rng(0).permutation(np.arange(1, 41))
    slots = slots_of(order, np.arange(num_tokens), 128)
    num_finite = 0
    for rank in range(8):
        stripe = StripeLayout(8, rank, 16, interleave)
        gpu, cpu = pools(spec, stripe, 41)
        foreign = stripe.owner(np.arange(num_tokens)) != rank
        mine = [tensor.clone() for tensor in rows]
        for tensor in mine:
            tensor[foreign] = float("nan")
        gpu.write(1, gpu.write_plan(slots), *(tensor.to(DEVICE) for tensor in mine))
        cpu.write(1, cpu.write_plan(slots), *mine)
        assert_equal_bits(gpu, cpu, without_sink=False)
        num_finite += gpu.count_finite_rows()
    assert num_finite == num_tokens * spec.num_heads


class CapturedWrites:
    """Writes of both layers for up to `num_tokens` tokens, recorded once, with a rotation."""

    def __init__(self, pool: StripedPagePool, num_tokens: int) -> None:
        self.pool = pool
        self.num_tokens = num_tokens
        # The sink takes what warm-up and padding write.
        self.plan = pool.write_plan(LogicalSlots(np.zeros(num_tokens, dtype=np.int64)))
        self.rows = [t.to(DEVICE) for t in self._split(step(pool.spec, num_tokens))]
        angles = torch.randn(4096, 32, generator=torch.Generator().manual_seed(9))
        self.rotation = Rotation(
            torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE),
            angles.cos().to(DEVICE),
            angles.sin().to(DEVICE),
        )
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self._write()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._write()

    def _split(self, rows: list[Tensor]) -> list[Tensor]:
        return list(rows[0].split((512, 64), dim=-1)) if self.pool.spec.kind == "mla" else rows

    def _write(self) -> None:
        for layer in range(2):
            self.pool.write(layer, self.plan, *self.rows, rotation=self.rotation)

    def replay(self, twin: StripedPagePool, slots: LogicalSlots, positions: Tensor) -> None:
        """A step of len(slots) tokens here by the graph and in `twin` by torch."""
        fresh = self._split(step(self.pool.spec, self.num_tokens, seed=len(slots)))
        for buffer, tensor in zip(self.rows, fresh, strict=True):
            buffer.copy_(tensor)
        self.rotation.positions[: len(slots)] = positions.to(DEVICE)
        assert self.pool.write_plan(slots, into=self.plan) is self.plan
        self.graph.replay()
        rotation = Rotation(positions, self.rotation.cos.cpu(), self.rotation.sin.cpu())
        for layer in range(2):
            rows = [tensor[: len(slots)] for tensor in fresh]
            twin.write(layer, twin.write_plan(slots), *rows, rotation=rotation)
        torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_captured_writes_replay_with_new_slots(kind: str, dtype: torch.dtype) -> None:
    """Two captured sizes take turns; long steps after short ones and short after long."""
    scale_mode = "per_token" if dtype == torch.float8_e4m3fn else "none"
    gpu, cpu = pools(
        spec_of(kind, dtype, scale_mode), StripeLayout(2, int(kind == "mla"), 16, 4), 33
    )
    captured = [CapturedWrites(gpu, num_tokens) for num_tokens in (8, 64)]
    order = np.random.default_rng(1).permutation(np.arange(1, 33))
    start = 0
    for size, num_tokens in ((0, 8), (1, 64), (0, 3), (1, 9), (1, 63), (0, 1), (1, 64), (0, 7)):
        positions = np.arange(start, start + num_tokens)
        slots = slots_of(order, positions, 32)
        captured[size].replay(cpu, slots, torch.from_numpy(positions))
        assert_equal_bits(gpu, cpu, without_sink=True)
        start += num_tokens
    assert cpu.count_finite_rows() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_handoff_of_bytes_between_pools_on_gpu_and_cpu(dtype: torch.dtype) -> None:
    spec = spec_of("gqa", dtype)
    positions = np.arange(300)
    source, twin = pools(spec, StripeLayout(2, 1, 16), 12)
    mine = positions[positions % 2 == 1]
    slots = slots_of(range(1, 12), mine, 32)
    rows = step(spec, len(mine))
    for layer in range(2):
        source.write(layer, source.write_plan(slots), *(t.to(DEVICE) for t in rows))
        twin.write(layer, twin.write_plan(slots), *rows)
    layers, heads = range(2), range(2, 7)
    packed = source.gather(slots, layers, heads)
    want = twin.gather(slots, layers, heads)
    assert torch.equal(packed.cpu().view(torch.uint8), want.view(torch.uint8))
    payload = bytearray(packed.cpu().view(torch.uint8).numpy().tobytes())
    gpu, cpu = pools(spec, StripeLayout(1, 0, 64), 7)
    there = slots_of([3, 1, 2, 6, 5], mine, 64)
    for pool in (gpu, cpu):
        arrived = pool.packed_from_bytes(memoryview(payload), len(layers), len(heads))
        pool.scatter(there, layers, heads, arrived)
    assert_equal_bits(gpu, cpu, without_sink=False)
    assert cpu.count_finite_rows() == 2 * len(mine) * len(heads)
