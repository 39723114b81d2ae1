"""Checks the laws of Group and StepChannel on every communicator, among 2, 3 and 4 processes.

argv: an empty directory. Rank 0 spawns the others, as a service does. Each rank prints one JSON
object a line: {"size", "kind", "law", "rank", "error"}; error is null where the law held.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attention.interface import Group
from kvbraid.engine.communicator import make_groups
from kvbraid.engine.ranks import RankContext, from_environment, spawn_ranks, start_run
from kvbraid.engine.shared_memory import SharedMemoryGroup
from kvbraid.engine.step_channel import StepChannel, make_step_channel
from kvbraid.engine.torch_step_channel import TorchStepChannel

SIZES = (2, 3, 4)
SHAPES = [(1, 576), (3, 5, 7), (0, 4), (), (8, 9, 64)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
# The last is larger than a slot, and not a multiple of one.
CASES = [*itertools.product(SHAPES, DTYPES), ((300_001,), torch.float32)]


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> Tensor:
    """What a rank contributes; every rank can compute everybody's."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def same(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype, f"{got.dtype} is not {expected.dtype}"
    assert got.shape == expected.shape, f"{got.shape} is not {expected.shape}"
    assert torch.equal(got, expected), "values differ"


def rank_order_sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def all_gather(group: Group) -> None:
    for shape, dtype in CASES:
        parts = [value(r, shape, dtype) for r in range(group.size)]
        mine = parts[group.rank].clone()
        same(group.all_gather(mine), torch.stack(parts))
        same(mine, parts[group.rank])


def close(got: Tensor, expected: Tensor) -> None:
    tolerance = 0.1 if got.dtype == torch.bfloat16 else 1e-5
    difference = (got.double() - expected.double()).abs()
    assert (difference <= tolerance * (1 + expected.double().abs())).all(), difference.max()


def all_reduce(group: Group) -> None:
    for shape, dtype in CASES:
        if dtype == torch.bool:
            continue
        parts = [value(r, shape, dtype) for r in range(group.size)]
        mine = parts[group.rank].clone()
        result = group.all_reduce(mine)
        assert result.data_ptr() == mine.data_ptr(), "not in place"
        expected = rank_order_sum(parts)
        same(group.all_gather(mine), mine.expand(group.size, *shape).contiguous())
        close(mine, expected)
        if isinstance(group, SharedMemoryGroup):
            same(mine, expected)


def reduce_scatter(group: Group) -> None:
    for shape, dtype in CASES:
        if dtype == torch.bool:
            continue
        parts = [value(r, (group.size, *shape), dtype) for r in range(group.size)]
        got = group.reduce_scatter(parts[group.rank].clone())
        expected = rank_order_sum([part[group.rank] for part in parts])
        close(got, expected)
        if isinstance(group, SharedMemoryGroup):
            same(got, expected)


def all_to_all(group: Group) -> None:
    size, rank = group.size, group.rank
    # splits[s][d]: rows from s to d; empty, uneven, one-sided and larger than a slot.
    layouts = [
        [[1] * size for _ in range(size)],
        [[(s + 2 * d) % 3 for d in range(size)] for s in range(size)],
        [[0] * size for _ in range(size)],
        [[5 if (s, d) == (0, size - 1) else 0 for d in range(size)] for s in range(size)],
    ]
    large = [[30_000 if (s, d) == (size - 1, 0) else 1 for d in range(size)] for s in range(size)]
    cases = [*itertools.product(layouts, [(3, 5), (), (17,)], DTYPES), (large, (17,), DTYPES[0])]
    for splits, row, dtype in cases:
        parts = [value(s, (sum(splits[s]), *row), dtype) for s in range(size)]
        receives = [splits[s][rank] for s in range(size)]
        got = group.all_to_all(parts[rank].clone(), splits[rank], receives)
        pieces = [torch.split(parts[s], splits[s])[rank] for s in range(size)]
        same(got, torch.cat(pieces))


def broadcast(group: Group) -> None:
    for source in range(group.size):
        for shape, dtype in CASES:
            tensor = value(group.rank, shape, dtype, source)
            result = group.broadcast(tensor, source)
            assert result.data_ptr() == tensor.data_ptr(), "not in place"
            same(tensor, value(source, shape, dtype, source))


def back_to_back(group: Group) -> None:
    """Ranks of changing speed: a slot that is written too early shows as a wrong number."""
    kept = []
    generator = torch.Generator().manual_seed(group.rank)
    for step in range(400 if isinstance(group, SharedMemoryGroup) else 50):
        work = int(torch.randint(0, 3, (), generator=generator)) * 2000
        torch.rand(work).sort()
        tensor = torch.full((64,), float(step * 10 + group.rank))
        kept.append((group.all_gather(tensor), group.all_reduce(tensor)))
    for step, (gathered, total) in enumerate(kept):
        expected = [float(step * 10 + r) for r in range(group.size)]
        assert gathered[:, 0].tolist() == expected, step
        assert total.unique().tolist() == [sum(expected)], step


def many_shapes(group: Group) -> None:
    for length in range(1, 600 if isinstance(group, SharedMemoryGroup) else 20):
        tensor = torch.full((length,), group.rank, dtype=torch.int32)
        assert int(group.all_reduce(tensor)[-1]) == sum(range(group.size)), length


def inference_mode_on_and_off(group: Group) -> None:
    for _ in range(3):
        for mode in (True, False):
            with torch.inference_mode(mode):
                tensor = torch.full((5, 3), float(group.rank))
                group.all_reduce(tensor)
                assert float(tensor.sum()) == 15.0 * sum(range(group.size))


def barrier(group: Group) -> None:
    directory = Path(sys.argv[1])
    for step in range(5):
        name = f"{group.size}-{type(group).__name__}-{step}"
        (directory / f"{name}-{group.rank}").touch()
        group.barrier()
        present = {path.name for path in directory.glob(f"{name}-*")}
        assert present == {f"{name}-{r}" for r in range(group.size)}, present
        group.barrier()


def wrong_arguments(group: Group) -> None:
    """Refused before anything is exchanged, so the ranks stay in lockstep."""
    for call in (
        lambda: group.reduce_scatter(torch.zeros(group.size + 1, 3)),
        lambda: group.all_to_all(torch.zeros(3, 2), [3], [3, 0, 0, 0, 0]),
        lambda: group.all_to_all(torch.zeros(1, 2), [3] + [0] * (group.size - 1), [0] * group.size),
        lambda: group.broadcast(torch.zeros(3), group.size),
    ):
        try:
            call()
        except ValueError:
            continue
        raise AssertionError("a wrong argument was accepted")
    group.barrier()


def step_plans(channel: StepChannel, context: RankContext) -> None:
    """Plans of any length arrive whole and in order; idle() runs while waiting."""
    lengths = [0, 1, 5, 1023, 1024, 8191, 8192, 70_000, *range(100)]
    rank = context.rank
    name = f"awaited-{context.world_size}-{type(channel).__name__}"
    first_is_awaited = Path(sys.argv[1]) / f"{name}-{rank}"
    if rank == 0:
        # A rank that comes later would find every plan there and never wait.
        others = [first_is_awaited.with_name(f"{name}-{r}") for r in range(1, context.world_size)]
        give_up = time.monotonic() + 30
        while not all(path.exists() for path in others):
            assert time.monotonic() < give_up, "a rank does not wait for the first plan"
            time.sleep(0.001)
    for index, length in enumerate(lengths):
        plan = np.arange(length, dtype=np.int64) * (index + 1) - (1 << 62)
        if rank == 0:
            channel.send(plan)
            plan[:] = -1  # the channel must have copied it
        else:
            got = channel.receive(first_is_awaited.touch)
            assert got.dtype == np.int64
            assert np.array_equal(got, plan), (index, length)


def idle_stops_waiting(channel: StepChannel, rank: int) -> None:
    class Enough(Exception):
        pass

    calls = 0

    def idle() -> None:
        nonlocal calls
        calls += 1
        if calls == 50:
            raise Enough

    if rank > 0:
        try:
            channel.receive(idle)
        except Enough:
            return
        raise AssertionError("received a plan that nobody sent")


GROUP_LAWS: list[Callable[[Group], None]] = [
    all_gather,
    all_reduce,
    reduce_scatter,
    all_to_all,
    broadcast,
    back_to_back,
    many_shapes,
    inference_mode_on_and_off,
    barrier,
    wrong_arguments,
]


def check(kind: str, law: str, context: RankContext, run: Callable[[], None]) -> None:
    error = None
    try:
        run()
    except (AssertionError, RuntimeError, ValueError):
        error = traceback.format_exc()[-2000:]
    entry = {"size": context.world_size, "kind": kind, "law": law, "rank": context.rank}
    os.write(1, (json.dumps({**entry, "error": error}) + "\n").encode())


def check_kind(kind: str, context: RankContext) -> None:
    size = context.world_size
    groups = make_groups(kind, context, tp_size=size, dcp_size=size, timeout_s=20)
    for law in GROUP_LAWS:
        check(kind, law.__name__, context, lambda law=law: law(groups.tp))  # type: ignore[misc]

    def contiguous_ranks() -> None:
        assert groups.dcp is groups.tp
        if size == 4:
            run = dataclasses.replace(context, run_id=context.run_id + "b")
            tp, dcp, control = make_groups(kind, run, tp_size=4, dcp_size=2, timeout_s=20)
            mine = torch.tensor([context.rank])
            assert (tp.size, dcp.size, dcp.rank) == (4, 2, context.rank % 2)
            assert control is tp
            first = context.rank // 2 * 2
            assert dcp.all_gather(mine).flatten().tolist() == [first, first + 1]
            assert tp.all_gather(mine).flatten().tolist() == [0, 1, 2, 3]
        run = dataclasses.replace(context, run_id=context.run_id + "c")
        assert make_groups(kind, run, tp_size=size, dcp_size=1, timeout_s=20).dcp.size == 1

    check(kind, "contiguous_ranks", context, contiguous_ranks)


def check_world(context: RankContext) -> None:
    check_kind("shared_memory", context)
    shared = make_step_channel(context)
    check("shared_memory", "step_plans", context, lambda: step_plans(shared, context))
    check("shared_memory", "idle", context, lambda: idle_stops_waiting(shared, context.rank))
    assert not torch.distributed.is_initialized(), "shared memory needs no torch.distributed"
    check_kind("gloo", context)
    gloo = TorchStepChannel.connect(context, 60)
    check("gloo", "step_plans", context, lambda: step_plans(gloo, context))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    context = from_environment()
    ranks = None
    if context is None:
        # One process a rank of the largest world; the smaller ones use the first of them.
        context = start_run(max(SIZES))
        ports = [str(start_run(size).master_port) for size in SIZES]
        ranks = spawn_ranks([sys.executable, *sys.argv, *ports], context)
    else:
        ports = sys.argv[2:]
    for size, port in zip(SIZES, ports, strict=True):
        if context.rank < size:
            run_id = f"{context.run_id}-{size}"
            rank, address = context.rank, context.master_addr
            check_world(RankContext(rank, size, rank, size, run_id, address, int(port)))
    if ranks is not None:
        codes = ranks.stop(grace_s=30)
        assert codes == (0,) * (max(SIZES) - 1), codes


if __name__ == "__main__":
    main()
