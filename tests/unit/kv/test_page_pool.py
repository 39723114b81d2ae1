"""One rank's stripe of the KV cache. Everything not written is NaN and must stay so."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attention.interface import GQACache, MLACache
from attention.layout import StripeLayout
from kvbraid.kv.page_pool import KvSpec, StripedPagePool
from kvbraid.kv.slots import LogicalSlots, PhysicalRows, slots_of

GQA = KvSpec("gqa", 2, 3, 4, 4, torch.float32)
MLA = KvSpec("mla", 2, 1, 6, 0, torch.bfloat16)


def poisoned(
    spec: KvSpec, *, num_pages: int, page_size: int, size: int = 1, rank: int = 0
) -> StripedPagePool:
    pool = StripedPagePool(spec, num_pages, StripeLayout(size, rank, page_size), "cpu")
    pool.fill_nan()
    return pool


def logical(*ids: int) -> LogicalSlots:
    return LogicalSlots(np.array(ids, dtype=np.int64))


def token_rows(spec: KvSpec, num_tokens: int) -> list[torch.Tensor]:
    """Key and value, or latent, of `num_tokens` tokens, every element different."""
    heads = (spec.num_heads,) if spec.kind == "gqa" else ()
    widths = [spec.key_width, spec.value_width] if spec.kind == "gqa" else [spec.key_width]
    rows = []
    for number, width in enumerate(widths):
        shape = (num_tokens, *heads, width)
        rows.append(torch.arange(torch.Size(shape).numel()).reshape(shape) / 7 + 100 * number)
    return rows


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("spec", [GQA, MLA], ids=["gqa", "mla"])
def test_each_rank_writes_exactly_its_own_tokens(spec: KvSpec, rank: int) -> None:
    pool = poisoned(spec, num_pages=5, page_size=2, size=3, rank=rank)
    positions = np.arange(11)
    slots = slots_of([4, 2], positions, 6)
    rows = token_rows(spec, 11)
    owned = [p for p in positions if p % 3 == rank]
    for tensor in rows:
        tensor[[p for p in positions if p % 3 != rank]] = float("nan")
    for layer in range(spec.num_layers):
        pool.write(layer, pool.write_plan(slots), *rows)
    assert pool.count_finite_rows() == spec.num_layers * len(owned) * spec.num_heads
    for layer in range(spec.num_layers):
        for tensor, stored in zip(rows, pool.layer(layer)[: len(rows)], strict=True):
            for p in owned:
                page = [4, 2][p // 6]
                assert torch.equal(stored[page, p % 6 // 3], tensor[p].to(spec.dtype))


def test_pool_larger_than_its_rows_writes_owned_rows_only() -> None:
    """dcp.md bug 21: with 16 rows and c = 4, logical 32..47 are rows 8..11 of each rank."""
    pool = poisoned(MLA, num_pages=4, page_size=4, size=4, rank=1)
    plan = pool.write_plan(logical(*range(32, 48)))
    assert plan.rows.tolist() == [8, 9, 10, 11]
    pool.write(0, plan, torch.arange(16.0)[:, None].expand(16, 6))
    assert pool.layer(0)[0].view(16, 6)[8:12, 0].tolist() == [1, 5, 9, 13]


def test_backup_of_a_ragged_sequence_is_restored_on_other_pages() -> None:
    """dcp.md bug 22: rows 3, 3, 2, 2 of L = 10, c = 4 survive a move to new pages."""
    saved = []
    for rank in range(4):
        pool = poisoned(GQA, num_pages=6, page_size=2, size=4, rank=rank)
        positions = np.arange(10)
        owned = positions[positions % 4 == rank]
        pool.write(1, pool.write_plan(slots_of([3, 1], positions, 8)), *token_rows(GQA, 10))
        backup = pool.gather(slots_of([3, 1], owned, 8), range(1, 2), range(3))
        saved.append(backup.shape[1])
        pool.fill_nan()
        pool.scatter(slots_of([2, 5], owned, 8), range(1, 2), range(3), backup)
        key, value = token_rows(GQA, 10)
        expected = torch.cat([key, value], dim=-1)[owned]
        assert torch.equal(
            pool.gather(slots_of([2, 5], owned, 8), range(1, 2), range(3))[0], expected
        )
        assert pool.count_finite_rows() == len(owned) * 3
    assert saved == [3, 3, 2, 2]


@pytest.mark.parametrize(("slot", "is_legal"), [(20, True), (47, True), (48, False), (-1, False)])
def test_legal_slots_are_counted_in_the_logical_space(slot: int, is_legal: bool) -> None:
    """dcp.md bug 23: C = 8, P = 4, c = 4 and a reserved page make slots below (8 + 4) * 4 legal."""
    pool = poisoned(MLA, num_pages=3, page_size=4, size=4, rank=slot % 4)
    if is_legal:
        assert pool.write_plan(logical(slot)).rows.tolist() == [slot // 4]
    else:
        with pytest.raises(ValueError, match=r"outside \[0, 48\)"):
            pool.write_plan(logical(slot))


def test_ids_are_translated_once_and_never_twice() -> None:
    """dcp.md bug 25: rows 8..11 of slots 33, 37, 41, 45 cannot pass the door again."""
    pool = poisoned(MLA, num_pages=4, page_size=4, size=4, rank=1)
    plan = pool.write_plan(logical(33, 37, 41, 45))
    assert plan.rows.tolist() == [8, 9, 10, 11]
    with pytest.raises(TypeError, match=r"LogicalSlots.*PhysicalRows"):
        pool.write_plan(PhysicalRows(plan.rows.numpy()))  # type: ignore[arg-type]


@pytest.mark.parametrize("door", ["write_plan", "gather", "scatter", "count_finite_rows"])
@pytest.mark.parametrize("ids", [PhysicalRows(np.array([8])), np.array([33]), [33]], ids=repr)
def test_every_door_refuses_anything_but_logical_slots(door: str, ids: object) -> None:
    pool = poisoned(MLA, num_pages=4, page_size=4, size=4, rank=1)
    more = {
        "gather": (range(2), range(1)),
        "scatter": (range(2), range(1), torch.zeros(2, 1, 1, 6)),
    }
    with pytest.raises(TypeError, match=rf"LogicalSlots.*{type(ids).__name__}"):
        getattr(pool, door)(ids, *more.get(door, ()))


def test_layers_are_views_in_the_shape_that_attention_reads() -> None:
    gqa = poisoned(GQA, num_pages=3, page_size=4)
    cache = gqa.layer(1)
    assert isinstance(cache, GQACache)
    key = cache.key
    assert key.shape == cache.value.shape == (3, 4, 3, 4)
    assert cache.key_scale is None
    assert cache.value_scale is None
    mla = poisoned(MLA, num_pages=3, page_size=4)
    assert isinstance(mla.layer(0), MLACache)
    assert mla.layer(0)[0].shape == (3, 4, 6)
    key[2, 1] = 5.0
    assert gqa.gather(logical(9), range(1, 2), range(3))[..., :4].flatten().tolist() == [5.0] * 12


def test_padding_tokens_land_in_the_sink_page() -> None:
    pool = poisoned(GQA, num_pages=3, page_size=4)
    pool.write(0, pool.write_plan(logical(0, 0, 6)), *token_rows(GQA, 3))
    assert pool.count_finite_rows(logical(*range(4, 12))) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_gather_and_scatter_move_bits(dtype: torch.dtype) -> None:
    spec = KvSpec("gqa", 3, 3, 4, 2, dtype)
    source = poisoned(spec, num_pages=4, page_size=2)
    target = poisoned(spec, num_pages=9, page_size=4, size=2, rank=1)
    bits = torch.randint(0, 256, (3, 4, 3, 6 * dtype.itemsize), dtype=torch.uint8)
    rows = bits.view(dtype)
    source.scatter(logical(2, 3, 6, 7), range(3), range(3), rows)
    moved = source.gather(logical(2, 3, 6, 7), range(1, 3), range(1, 3))
    assert torch.equal(moved.view(torch.uint8), bits[1:, :, 1:])
    target.scatter(logical(33, 9, 11, 1), range(1, 3), range(1, 3), moved)
    back = target.gather(logical(1, 11, 9, 33), range(1, 3), range(1, 3))
    assert torch.equal(back.flip(1).view(torch.uint8), bits[1:, :, 1:])
    untouched = target.gather(logical(1, 11, 9, 33), range(1), range(3))
    assert untouched.float().isnan().all()


def test_written_rows_are_converted_to_the_storage_type() -> None:
    spec = KvSpec("gqa", 1, 1, 2, 2, torch.float8_e4m3fn)
    pool = poisoned(spec, num_pages=2, page_size=4)
    rows = torch.tensor([[[0.3, -7.0]]])
    pool.write(0, pool.write_plan(logical(5)), rows, rows)
    expected = rows.to(torch.float8_e4m3fn)
    assert torch.equal(pool.layer(0)[0][1, 1].float(), expected[0].float())


def test_payload_bytes_become_rows_without_a_copy() -> None:
    pool = poisoned(MLA, num_pages=3, page_size=4)
    rows = torch.randn(2, 3, 1, 6).bfloat16()
    buffer = bytearray(rows.view(torch.uint8).numpy().tobytes())
    packed = pool.packed_from_bytes(memoryview(buffer), num_layers=2, num_heads=1)
    assert torch.equal(packed, rows)
    with pytest.raises(ValueError, match="11 bytes are not rows"):
        pool.packed_from_bytes(memoryview(bytearray(11)), num_layers=2, num_heads=1)


def test_foreign_rows_are_neither_gathered_nor_scattered() -> None:
    pool = poisoned(MLA, num_pages=4, page_size=4, size=4, rank=1)
    with pytest.raises(ValueError, match="slot 34 and 0 others are not owned by dcp rank 1 of 4"):
        pool.gather(logical(33, 34), range(2), range(1))
    with pytest.raises(ValueError, match="not owned"):
        pool.scatter(logical(32), range(2), range(1), torch.zeros(2, 1, 1, 6).bfloat16())
    assert pool.count_finite_rows() == 0


@pytest.mark.parametrize(
    ("layers", "heads"), [(range(3), range(3)), (range(2), range(1, 4)), (range(0, 2, 2), range(3))]
)
def test_layers_and_heads_outside_the_pool_are_refused(layers: range, heads: range) -> None:
    with pytest.raises(ValueError, match="is outside"):
        poisoned(GQA, num_pages=3, page_size=4).gather(logical(4), layers, heads)


def test_rows_of_the_wrong_shape_are_refused() -> None:
    pool = poisoned(GQA, num_pages=3, page_size=4)
    plan = pool.write_plan(logical(4, 5))
    with pytest.raises(ValueError, match="takes 2 tensors, got 1"):
        pool.write(0, plan, torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="plan is for 2 tokens, got 3"):
        pool.write(0, plan, torch.zeros(3, 3, 4), torch.zeros(3, 3, 4))
    with pytest.raises(ValueError, match="packed must be"):
        pool.scatter(logical(4), range(2), range(3), torch.zeros(2, 1, 3, 4))
    with pytest.raises(TypeError, match="WritePlan, got list"):
        pool.write(0, [4, 5], torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))  # type: ignore[arg-type]


def test_rank_without_heads_stores_nothing() -> None:
    pool = poisoned(KvSpec("gqa", 2, 0, 4, 4, torch.float32), num_pages=3, page_size=4)
    pool.write(0, pool.write_plan(logical(4)), torch.zeros(1, 0, 4), torch.zeros(1, 0, 4))
    assert pool.num_bytes == 0
    assert pool.gather(logical(4), range(2), range(0)).shape == (2, 1, 0, 8)


def test_bytes_count_every_page_layer_and_head() -> None:
    assert poisoned(GQA, num_pages=3, page_size=4).num_bytes == 2 * 3 * 4 * 3 * 8 * 4
    assert GQA.row_bytes == 32
    assert MLA.row_bytes == 12


@pytest.mark.parametrize(
    "changes",
    [("mha", 2, 3, 4, 4), ("mla", 2, 2, 4, 0), ("mla", 2, 1, 4, 4), ("gqa", 0, 3, 4, 4)],
    ids=str,
)
def test_impossible_specs_are_refused(changes: tuple[str, int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"must be|takes one head"):
        KvSpec(*changes, torch.float32)


@pytest.mark.parametrize("spec", [GQA, MLA], ids=["gqa", "mla"])
def test_parts_of_a_plan_are_refilled_with_it(spec: KvSpec) -> None:
    pool = poisoned(spec, num_pages=5, page_size=2)
    plan = pool.write_plan(logical(0, 0, 0, 0))
    parts = pool.write_plan_parts(plan, 2)
    pool.write_plan(logical(9, 4, 5), into=plan)
    rows = token_rows(spec, 4)
    for number, part in enumerate(parts):
        pool.write(0, part, *(tensor[2 * number : 2 * number + 2] for tensor in rows))
    for tensor, stored in zip(rows, pool.layer(0)[: len(rows)], strict=True):
        for token, slot in enumerate((9, 4, 5, 0)):
            assert torch.equal(stored[slot // 2, slot % 2], tensor[token].to(spec.dtype))
    assert pool.count_finite_rows() == 4 * spec.num_heads


def test_parts_of_the_triton_movers_plans_share_its_memory() -> None:
    pytest.importorskip("triton")
    from attention.backends.triton_rows import TritonRows
    from attention.kv_rows import RowStore

    mover = TritonRows([RowStore(torch.zeros(1, 8, 1, 4))], StripeLayout(1, 0, 2))
    plan = mover.plan(np.zeros(4, dtype=np.int64))
    parts = mover.parts(plan, 2)
    mover.refill(plan, np.array([7, 3, 5]))
    assert [part.slots.tolist() for part in parts] == [[7, 3], [5, 0]]
    assert [part.num_tokens for part in parts] == [2, 2]


def test_parts_that_a_plan_does_not_have_are_refused() -> None:
    pool = poisoned(GQA, num_pages=5, page_size=2)
    with pytest.raises(ValueError, match="parts of 3 do not divide a plan of 4 tokens"):
        pool.write_plan_parts(pool.write_plan(logical(2, 3, 4, 5)), 3)
    striped = poisoned(GQA, num_pages=5, page_size=2, size=2)
    with pytest.raises(ValueError, match="on one rank only, not on 2"):
        striped.write_plan_parts(striped.write_plan(logical(2, 3)), 1)
