"""Runs the Triton row mover on pools of many shapes and prints what was wrong, as JSON.

A program of its own because TRITON_INTERPRET must be set before triton is imported.
tests/gpu/test_kv_rows_on_gpu.py loads it to run the same cases, and larger ones, on a GPU.

The truth is worked out here from the owner rule's definition, one token at a time and in float64;
the torch mover must agree bit for bit.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from attention.backends.torch_rows import TorchRows
from attention.backends.triton_rows import TritonRows
from attention.kv_rows import FP8_MAX, Rotation, RowMover, RowStore
from attention.layout import StripeLayout

NUM_PAGES = 64
NUM_LAYERS = 2
LAYER = 1
# First position and length of each sequence's tokens: a prompt, a chunk, a decode token.
CHUNKS = ((0, 37), (5, 9), (30, 1))
NUM_PADDING = 3
# Relative precision of a type, and what is lost of the smallest numbers, in units of the scale.
PRECISION = {
    "float32": (2.0**-22, 0.0),
    "bfloat16": (2.0**-8, 0.0),
    "float16": (2.0**-11, 2.0**-24),
    "float8_e4m3fn": (2.0**-4, 2.0**-10),
}


@dataclass(frozen=True)
class Case:
    """kind: gqa, mla (one joined latent) or mla_split (latent and rope key). rotary: numbers.

    is_exact: rows are whole numbers that float8 holds, since the interpreter cannot round to it.
    """

    kind: str
    dcp_size: int
    page_size: int
    interleave: int = 1
    source: str = "float32"
    stored: str = "float32"
    scale: str = "none"
    heads: int = 3
    widths: tuple[int, int] = (24, 16)  # key and value, or latent and rope key
    rotary: int = 0
    gptj: bool = False
    is_exact: bool = False

    def stripe(self, rank: int) -> StripeLayout:
        return StripeLayout(self.dcp_size, rank, self.page_size, self.interleave)

    def owned_row(self, rank: int, page: int, offset: int) -> int | None:
        """Physical row on `rank` of a place in a logical page, by counting; None if not its own."""
        places = range(self.page_size * self.dcp_size)
        own = [place for place in places if place // self.interleave % self.dcp_size == rank]
        return page * self.page_size + own.index(offset) if offset in own else None


@dataclass
class Tokens:
    """A step: logical page and place in it of each token; padding tokens last, in page 0."""

    case: Case
    pages: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.case.page_size * self.case.dcp_size
        free = iter(np.random.default_rng(0).permutation(np.arange(1, NUM_PAGES)).tolist())
        for start, length in CHUNKS:
            table: dict[int, int] = {}
            for position in range(start, start + length):
                if position // size not in table:
                    table[position // size] = next(free)
                self.pages.append(table[position // size])
                self.offsets.append(position % size)
                self.positions.append(position)
        self.pages += [0] * NUM_PADDING
        self.offsets += [0] * NUM_PADDING
        self.positions += [0] * NUM_PADDING

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def slots(self) -> np.ndarray:
        size = self.case.page_size * self.case.dcp_size
        return np.array(self.pages) * size + np.array(self.offsets)

    def rows(self, rank: int) -> list[int | None]:
        places = zip(self.pages, self.offsets, strict=True)
        return [self.case.owned_row(rank, page, offset) for page, offset in places]


def stores_of(case: Case, device: torch.device) -> list[RowStore]:
    """A pool of arbitrary bytes, the same each time."""
    generator = torch.Generator().manual_seed(1)
    dtype = getattr(torch, case.stored)
    heads = case.heads if case.kind == "gqa" else 1
    widths = case.widths if case.kind == "gqa" else (sum(case.widths),)
    shape = (NUM_LAYERS, NUM_PAGES * case.page_size, heads)
    stores = []
    for number, width in enumerate(widths):
        size = (*shape, width * dtype.itemsize)
        rows = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        scale = {
            "none": None,
            "per_tensor": torch.tensor(
                [[9.0], [(0.0625 if case.is_exact else 0.03) * (1 + number)]]
            ),
            "per_token": torch.full((NUM_LAYERS, NUM_PAGES, heads, case.page_size), -7.0),
        }[case.scale]
        scale = None if scale is None else scale.to(device)
        stores.append(RowStore(rows.view(dtype).to(device), scale))
    return stores


def step_rows(case: Case, tokens: Tokens, rank: int) -> list[Tensor]:
    """What the step computed; rows of other ranks are NaN. Keys are views with a stride."""
    generator = torch.Generator().manual_seed(2)
    heads = (case.heads,) if case.kind == "gqa" else ()
    rows = []
    for width in case.widths:
        shape = (len(tokens), *heads, width)
        tensor = torch.randn(shape, generator=generator)
        tensor[..., 0] *= 20
        if case.is_exact:
            tensor = torch.randint(-15, 16, shape, generator=generator).float()
            # The largest: a scale of its own is a power of two.
            tensor[..., 0] = FP8_MAX / 8
            # Divided by the smallest scale of a layer it is too large and is no FP8_MAX times 2^n.
            tensor[..., 1] = 32.0
        tensor[5] = 0.0
        rows.append(tensor.to(getattr(torch, case.source)))
    for token, row in enumerate(tokens.rows(rank)):
        if row is None:
            for tensor in rows:
                tensor[token] = float("nan")
    if case.kind == "mla":
        return [torch.cat(rows, dim=-1)]
    return [torch.cat((tensor, tensor), dim=1)[:, : tensor.shape[1]] for tensor in rows]


def rotation_of(case: Case, tokens: Tokens, device: torch.device) -> Rotation | None:
    if not case.rotary:
        return None
    frequencies = 100.0 ** -(torch.arange(case.rotary // 2) / case.rotary * 2)
    angles = torch.arange(64)[:, None] * frequencies
    cos, sin = (angles.cos() * 1.1).to(device), (angles.sin() * 1.1).to(device)
    return Rotation(torch.tensor(tokens.positions, device=device), cos, sin, case.gptj)


def true_row(case: Case, rows: list[Tensor], rotation: Rotation | None, token: int) -> list[Tensor]:
    """float64 [Hk, W] of each store: rotated by complex multiplication."""
    parts = [tensor[token].double() for tensor in rows]
    if rotation is not None:
        index = 0 if case.kind == "gqa" else 1
        position = int(rotation.positions[token])
        turn = torch.complex(rotation.cos[position].double(), rotation.sin[position].double())
        key, half = parts[index], case.rotary // 2
        if case.gptj:
            first, second = key[..., 0 : case.rotary : 2], key[..., 1 : case.rotary : 2]
        else:
            first, second = key[..., :half], key[..., half : case.rotary]
        turned = torch.complex(first, second) * turn
        pairs = (turned.real, turned.imag)
        joined = torch.stack(pairs, -1).flatten(-2) if case.gptj else torch.cat(pairs, -1)
        parts[index] = torch.cat((joined, key[..., case.rotary :]), -1)
    if case.kind == "gqa":
        return parts
    return [torch.cat(parts, -1)[None]]


def append(
    case: Case,
    device: torch.device,
    *,
    slots_in: str = "int64",
) -> dict[str, object]:
    """Write one step on every rank."""
    tokens = Tokens(case)
    result: dict[str, object] = {"error": 0.0}
    result |= {"untouched": True, "same_as_torch": True}
    num_written = 0
    for rank in range(case.dcp_size):
        rows, stores = step_rows(case, tokens, rank), stores_of(case, device)
        mover = TritonRows(stores, case.stripe(rank))
        plan = mover.plan(tokens.slots)
        plan.slots = plan.slots.to(getattr(torch, slots_in))
        on_device = [place(tensor, device) for tensor in rows]
        mover.append(LAYER, plan, on_device, rotation_of(case, tokens, device))

        cpu = torch.device("cpu")
        oracle = stores_of(case, cpu)
        by_torch = TorchRows(oracle, case.stripe(rank))
        rotation = rotation_of(case, tokens, cpu)
        by_torch.append(LAYER, by_torch.plan(tokens.slots), rows, rotation)

        written = {row: t for t, row in enumerate(tokens.rows(rank)) if row is not None}
        num_written += len(written) - (0 in written)
        got = [RowStore(s.rows.cpu(), None if s.scale is None else s.scale.cpu()) for s in stores]
        result["untouched"] &= untouched(got, stores_of(case, cpu), set(written))
        result["same_as_torch"] &= same(got, oracle)
        for row, token in written.items():
            if row != 0:
                truth = true_row(case, rows, rotation, token)
                result["error"] = max(
                    result["error"], error(PRECISION[case.stored], got, truth, row)
                )
    result["each_token_once"] = num_written == len(tokens) - NUM_PADDING
    return result


def place(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on the device with the strides it has: copies would make it contiguous."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
    ).copy_(tensor)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def parts_of(stores: list[RowStore]) -> list[Tensor]:
    """Every tensor of a pool whose first two dimensions are layers and rows."""
    scales = [store.scale for store in stores if store.scale is not None and store.is_per_token]
    return [store.rows for store in stores] + [rows_of_scales(scale)[..., None] for scale in scales]


def rows_of_scales(scale: Tensor) -> Tensor:
    """[L, N, Hk, P] -> [L, N * P, Hk]."""
    return scale.transpose(2, 3).flatten(1, 2)


def same(got: list[RowStore], want: list[RowStore]) -> bool:
    """Whole pools, bit for bit, but for the row of padding tokens, which race for it."""
    pairs = zip(parts_of(got), parts_of(want), strict=True)
    return all(torch.equal(bits(a[:, 1:]), bits(b[:, 1:])) for a, b in pairs)


def untouched(got: list[RowStore], before: list[RowStore], written: set[int]) -> bool:
    """Whether the other layer and the rows that are not in `written` are what they were."""
    num_rows = got[0].rows.shape[1]
    others = [row for row in range(num_rows) if row not in written]
    return all(
        torch.equal(bits(a[0]), bits(b[0]))
        and torch.equal(bits(a)[LAYER, others], bits(b)[LAYER, others])
        for a, b in zip(parts_of(got), parts_of(before), strict=True)
    )


def error(
    precision: tuple[float, float], stores: list[RowStore], truth: list[Tensor], row: int
) -> float:
    """Largest error of a row in units of what its type may lose."""
    relative, floor = precision
    worst = 0.0
    for store, want in zip(stores, truth, strict=True):
        scale = torch.ones(1, dtype=torch.float64)
        if store.scale is not None:
            scale = store.scale[LAYER].double()
            if store.is_per_token:
                scale = rows_of_scales(store.scale)[LAYER, row][:, None].double()
        if store.rows.dtype == torch.float8_e4m3fn:
            want = want.clamp(-FP8_MAX * scale, FP8_MAX * scale)
        have = store.rows[LAYER, row].float().double() * scale
        # A rotation is computed in float32, whose error is that of the larger number of a pair.
        allowed = relative * want.abs() + floor * scale + 2.0**-22 * want.abs().max()
        lost = (have - want).abs().nan_to_num(nan=1e9) / (allowed + 1e-30)
        worst = max(worst, float(lost.max()))
    return worst


def append_twice_filtered(device: torch.device) -> list[int]:
    """dcp.md bug 25: rows of slots 33, 37, 41, 45 taken for slots; what is then written."""
    case = Case("mla", 4, 4, widths=(4, 2))
    stores = stores_of(case, device)
    before = stores[0].rows.clone()
    mover = TritonRows(stores, case.stripe(1))
    rows = torch.arange(4.0)[:, None].expand(4, 6).contiguous().to(device)
    mover.append(LAYER, mover.plan(np.array([8, 9, 10, 11])), [rows])
    changed = bits(stores[0].rows) != bits(before)
    return changed[LAYER].flatten(1).any(1).nonzero().flatten().tolist()


def negative_slots(device: torch.device) -> bool:
    """Slots below zero are nobody's, on every rank and for every interleave."""
    for dcp_size, interleave in itertools.product((1, 2, 3), (1, 4)):
        case = Case("mla", dcp_size, 4, interleave, widths=(4, 2))
        for rank in range(dcp_size):
            stores = stores_of(case, device)
            mover = TritonRows(stores, case.stripe(rank))
            slots = np.arange(-9, 0)
            mover.append(LAYER, mover.plan(slots), [torch.ones(9, 6, device=device)])
            if not untouched(stores, stores_of(case, device), set()):
                return False
    return True


def move(source: Case, target: Case, device: torch.device) -> dict[str, object]:
    """Hand a sequence over from the ranks of `source` to those of `target`, by head halves."""
    length = 41
    heads = source.heads if source.kind == "gqa" else 1
    cuts = [range(heads // 2), range(heads // 2, heads)]
    width = sum(source.widths)
    generator = torch.Generator().manual_seed(3)
    dtype = getattr(torch, source.stored)
    golden = torch.randint(
        0,
        256,
        (NUM_LAYERS, length, heads, width * dtype.itemsize),
        dtype=torch.uint8,
        generator=generator,
    ).view(dtype)
    result: dict[str, object] = {"same_as_torch": True, "untouched": True, "arrived": True}
    senders = [fill(source, rank, golden, device) for rank in range(source.dcp_size)]
    for rank in range(target.dcp_size):
        stores = stores_of(target, device)
        mover = TritonRows(stores, target.stripe(rank))
        mine = rows_of_sequence(target, rank, length)
        for sender, (theirs, mover_there, by_torch) in enumerate(senders):
            both = [p for p in range(length) if p in mine and p in theirs]
            for layers, cut in itertools.product((range(1), range(1, 2)), cuts):
                there = torch.tensor([theirs[p] for p in both], dtype=torch.int64, device=device)
                here = torch.tensor([mine[p] for p in both], dtype=torch.int64, device=device)
                packed = mover_there.gather(there, layers, cut)
                want = by_torch.gather(there.cpu(), layers, cut)
                result["same_as_torch"] &= torch.equal(bits(packed.cpu()), bits(want))
                mover.scatter(here, layers, cut, packed)
            del sender
        got = torch.cat([store.rows.cpu() for store in stores], dim=-1)
        where = list(mine.values())
        result["arrived"] &= torch.equal(bits(got[:, where]), bits(golden[:, list(mine)]))
        before = torch.cat([s.rows for s in stores_of(target, torch.device("cpu"))], dim=-1)
        others = [row for row in range(got.shape[1]) if row not in set(where)]
        result["untouched"] &= torch.equal(bits(got[:, others]), bits(before[:, others]))
    return result


def rows_of_sequence(case: Case, rank: int, length: int) -> dict[int, int]:
    """Position -> physical row of what `rank` keeps of a sequence on shuffled pages."""
    size = case.page_size * case.dcp_size
    pages = np.random.default_rng(7).permutation(np.arange(1, NUM_PAGES)).tolist()
    found = {p: case.owned_row(rank, pages[p // size], p % size) for p in range(length)}
    return {position: row for position, row in found.items() if row is not None}


def fill(
    case: Case, rank: int, golden: Tensor, device: torch.device
) -> tuple[dict[int, int], RowMover, RowMover]:
    """A rank that holds its rows of `golden`: where they are, its mover and its torch twin."""
    rows = rows_of_sequence(case, rank, golden.shape[1])
    movers: list[RowMover] = []
    for kind, where in ((TritonRows, device), (TorchRows, torch.device("cpu"))):
        stores = stores_of(case, where)
        places = torch.tensor(list(rows.values()), device=where)
        numbers = golden[:, list(rows)].to(where)
        start = 0
        for store in stores:
            width = store.rows.shape[-1]
            bytes_of = store.rows.view(torch.uint8)
            taken = numbers[..., start : start + width].contiguous().view(torch.uint8)
            bytes_of.index_copy_(1, places, taken)
            start += width
        movers.append(kind(stores, case.stripe(rank)))
    return rows, movers[0], movers[1]


INTERPRETED = (
    *(Case("gqa", c, p, i) for c in (1, 2, 3) for p, i in ((1, 1), (4, 1), (4, 4), (16, 16))),
    *(Case("mla", c, p, i) for c in (2, 3) for p, i in ((1, 1), (4, 4), (16, 1))),
    Case("mla", 2, 4, source="float16", stored="float16", widths=(64, 16)),
    Case("mla_split", 2, 16, 4, widths=(64, 16)),
    Case("gqa", 2, 4, 2, source="float16", stored="float16"),
    Case("gqa", 3, 4, source="float32", stored="float16", heads=1),
    Case("gqa", 2, 4, rotary=24),
    Case("gqa", 2, 4, rotary=16, gptj=True),
    Case("gqa", 3, 4, 2, source="float16", stored="float16", rotary=10),
    Case("mla_split", 3, 4, widths=(64, 16), rotary=16),
    Case("mla_split", 2, 4, 4, widths=(48, 16), rotary=16, gptj=True),
    Case("mla", 2, 4, source="bfloat16", stored="bfloat16", widths=(64, 16)),
    *(
        Case(kind, 2, 4, source=source, stored="float8_e4m3fn", scale=scale, is_exact=True)
        for kind in ("gqa", "mla", "mla_split")
        for scale in ("none", "per_tensor", "per_token")
        for source in ("float32", "float16")
    ),
)
MOVES = (
    (Case("gqa", 2, 4), Case("gqa", 3, 1)),
    (Case("gqa", 3, 16, 4), Case("gqa", 2, 4, 4)),
    (Case("mla", 1, 16), Case("mla", 4, 4)),
    (Case("gqa", 2, 4, stored="float16"), Case("gqa", 1, 1, stored="float16")),
    *(
        (Case("gqa", 2, 4, stored=t, widths=(7, 5)), Case("gqa", 3, 4, 2, stored=t, widths=(7, 5)))
        for t in ("bfloat16", "float8_e4m3fn")
    ),
)


def main() -> None:
    """Everything in the interpreter."""
    device = torch.device("cpu")
    answer = {
        "append": {str(case): append(case, device) for case in INTERPRETED},
        "int32": append(INTERPRETED[0], device, slots_in="int32"),
        "twice_filtered": append_twice_filtered(device),
        "negative_slots": negative_slots(device),
        "moves": {f"{a} -> {b}": move(a, b, device) for a, b in MOVES},
    }
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
