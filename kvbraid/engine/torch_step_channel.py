"""The step channel of a worker whose ranks are on several hosts: gloo broadcasts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from kvbraid.engine.ranks import RankContext
from kvbraid.engine.step_channel import IdleWaiter, IntArray, check_plan
from kvbraid.engine.torch_group import connect, failures_as_rank_lost, new_process_group

_HEAD_WORDS = 1024
# A worker may be idle for as long as it likes: a lost peer shows as a closed connection.
_NEVER_S = 10 * 365 * 86_400.0


class TorchStepChannel:
    """StepChannel over gloo. A plan of up to 1023 words is one broadcast, a longer one two."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._group = process_group
        self._rank = dist.get_rank(process_group)
        self._size = dist.get_world_size(process_group)

    @property
    def num_receivers(self) -> int:
        """Every rank but rank 0."""
        return self._size - 1

    @classmethod
    def connect(cls, context: RankContext, start_timeout_s: float) -> TorchStepChannel:
        """Joins torch.distributed's world (gloo) unless this process has, and makes a group."""
        connect("gloo", context, start_timeout_s)
        ranks = list(range(context.world_size))
        group = new_process_group(ranks, backend="gloo", timeout_s=_NEVER_S)
        assert group is not None
        return cls(group)

    def send(self, plan: IntArray) -> None:
        """Waits until gloo has taken the plan."""
        if self._rank != 0:
            raise ValueError(f"rank {self._rank} cannot send a step plan; only rank 0 does")
        check_plan(plan)
        head = torch.zeros(_HEAD_WORDS, dtype=torch.int64)
        head[0] = plan.size
        words = torch.from_numpy(np.array(plan))
        first = words[: _HEAD_WORDS - 1]
        head[1 : 1 + first.numel()] = first
        self._broadcast(head, IdleWaiter(_nothing))
        if (rest := words[_HEAD_WORDS - 1 :]).numel() > 0:
            self._broadcast(rest.clone(), IdleWaiter(_nothing))

    def receive(self, idle: Callable[[], None]) -> IntArray:
        """The next plan; spins, then sleeps longer and longer (see IdleWaiter)."""
        if self._rank == 0:
            raise ValueError("rank 0 sends step plans; only ranks above 0 receive them")
        head = torch.empty(_HEAD_WORDS, dtype=torch.int64)
        self._broadcast(head, IdleWaiter(idle))
        size = int(head[0])
        first = head[1 : 1 + min(size, _HEAD_WORDS - 1)]
        rest = torch.empty(size - first.numel(), dtype=torch.int64)
        if rest.numel() > 0:
            self._broadcast(rest, IdleWaiter(idle))
        plan: IntArray = torch.cat((first, rest)).numpy()
        return plan

    def _broadcast(self, words: Tensor, waiter: IdleWaiter) -> None:
        with failures_as_rank_lost():
            work = dist.broadcast(words, group=self._group, group_src=0, async_op=True)
            assert work is not None
        while not work.is_completed():
            waiter.wait()
        with failures_as_rank_lost():
            work.wait()


def _nothing() -> None:
    return None
