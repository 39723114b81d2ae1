"""Which communicator a worker uses: one process, shared memory on one host, gloo or NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from attention.interface import Group
from attention.single_group import SingleGroup
from kvbraid.engine.ranks import RankContext
from kvbraid.engine.segment import no_check
from kvbraid.errors import ConfigError

if TYPE_CHECKING:
    from kvbraid.engine.torch_group import TorchGroup

KINDS = ("shared_memory", "gloo", "nccl")


class RankGroups(NamedTuple):
    """The groups of one rank. dcp is `tp` itself where they have the same ranks.

    control has the ranks of `tp` and takes CPU tensors; it is `tp` itself unless that is NCCL's.
    """

    tp: Group
    dcp: Group
    control: Group


def make_groups(
    kind: str,
    context: RankContext,
    *,
    tp_size: int,
    dcp_size: int,
    timeout_s: float = 30.0,
    start_timeout_s: float = 60.0,
    check: Callable[[], None] = no_check,
) -> RankGroups:
    """The tensor-parallel group and this rank's DCP group: `dcp_size` consecutive ranks.

    kind: "shared_memory" (one host, needs no torch.distributed), "gloo" or "nccl". Every rank of
    the worker calls this and waits for the others; `check` is called while waiting and may raise.
    Collectives raise RankLostError after timeout_s without a peer; start-up after start_timeout_s.
    Raises ConfigError for sizes that do not fit the context or the kind.
    """
    if kind not in KINDS:
        raise ConfigError(f"communicator {kind!r} must be one of {', '.join(KINDS)}")
    if tp_size != context.world_size:
        raise ConfigError(f"tp_size {tp_size} must be the number of ranks, {context.world_size}")
    if dcp_size < 1 or tp_size % dcp_size:
        raise ConfigError(f"dcp_size {dcp_size} must be >= 1 and divide tp_size {tp_size}")
    if tp_size == 1:
        return RankGroups(SingleGroup(), SingleGroup(), SingleGroup())
    if kind == "shared_memory":
        return _shared_memory_groups(context, dcp_size, timeout_s, start_timeout_s, check)
    groups = _torch_groups(kind, context, dcp_size, timeout_s, start_timeout_s)
    if kind != "nccl":
        return groups
    if context.is_one_host:
        control = _shared_memory_groups(context, 1, timeout_s, start_timeout_s, check).tp
    else:
        control = _torch_groups("gloo", context, 1, timeout_s, start_timeout_s).tp
    return groups._replace(control=control)


def _shared_memory_groups(
    context: RankContext,
    dcp_size: int,
    timeout_s: float,
    start_timeout_s: float,
    check: Callable[[], None],
) -> RankGroups:
    from kvbraid.engine.shared_memory import SharedMemoryGroup

    if not context.is_one_host:
        raise ConfigError(
            f"communicator shared_memory needs all {context.world_size} ranks on one host, "
            f"here are {context.local_world_size}; use gloo or nccl"
        )

    def make(name: str, rank: int, size: int) -> Group:
        return SharedMemoryGroup(
            f"{context.run_id}-{name}",
            rank=rank,
            size=size,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
            check=check,
        )

    tp = make("tp", context.rank, context.world_size)
    index, dcp_rank = divmod(context.rank, dcp_size)
    if dcp_size == 1:
        return RankGroups(tp, SingleGroup(), tp)
    if dcp_size == context.world_size:
        return RankGroups(tp, tp, tp)
    return RankGroups(tp, make(f"dcp{index}", dcp_rank, dcp_size), tp)


def _torch_groups(
    backend: str, context: RankContext, dcp_size: int, timeout_s: float, start_timeout_s: float
) -> RankGroups:
    from kvbraid.engine.torch_group import connect, new_process_group

    make = _group_class(backend, context)
    connect(backend, context, start_timeout_s)
    world = list(range(context.world_size))
    process_group = new_process_group(world, backend=backend, timeout_s=timeout_s)
    assert process_group is not None
    tp: Group = make(process_group)
    dcp: Group = SingleGroup() if dcp_size == 1 else tp
    if 1 < dcp_size < context.world_size:
        for first in range(0, context.world_size, dcp_size):
            members = world[first : first + dcp_size]
            process_group = new_process_group(members, backend=backend, timeout_s=timeout_s)
            if process_group is not None:
                dcp = make(process_group)
    return RankGroups(tp, dcp, tp)


def _group_class(backend: str, context: RankContext) -> type[TorchGroup]:
    from kvbraid.engine.nccl_group import NcclGroup, OneHostNcclGroup
    from kvbraid.engine.torch_group import TorchGroup

    if backend != "nccl":
        return TorchGroup
    return OneHostNcclGroup if context.is_one_host else NcclGroup
