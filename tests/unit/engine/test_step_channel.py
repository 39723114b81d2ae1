"""Step plans reach the other ranks whole; see also the laws in test_communicator.py."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvbraid.engine.rank_lost import RankLostError
from kvbraid.engine.ranks import RankContext
from kvbraid.engine.step_channel import (
    SharedMemoryStepChannel,
    SingleStepChannel,
    make_step_channel,
)

AsThreads = Callable[[int, Callable[..., Any]], list[Any]]


def channel_of(name: str, group: Any, **options: float) -> SharedMemoryStepChannel:
    name = f"{os.getpid()}-0a0b0c0d-{name}"
    return SharedMemoryStepChannel(name, rank=group.rank, size=group.size, **options)


def test_an_idle_rank_does_not_burn_a_core(as_threads: AsThreads) -> None:
    def one_rank(group: Any) -> tuple[float, int]:
        channel = channel_of("idle", group)
        if group.rank == 0:
            group.barrier()
            group.barrier()
            channel.send(np.arange(3))
            return 0.0, 0
        calls = 0
        end = time.monotonic() + 0.5
        group.barrier()
        before = resource.getrusage(resource.RUSAGE_THREAD)

        def idle() -> None:
            nonlocal calls
            calls += 1
            if time.monotonic() > end:
                raise TimeoutError

        with pytest.raises(TimeoutError):
            channel.receive(idle)
        after = resource.getrusage(resource.RUSAGE_THREAD)
        group.barrier()
        assert channel.receive(lambda: None).tolist() == [0, 1, 2]
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return used, calls

    used, calls = as_threads(2, one_rank)[1]
    assert used < 0.15, "more than 30% of a core while idle"
    assert calls > 50, "idle() must run again and again"


def test_a_rank_that_takes_no_plan_is_lost(as_threads: AsThreads) -> None:
    def one_rank(group: Any) -> None:
        channel = channel_of("stuck", group, timeout_s=0.2)
        if group.rank == 0:
            for _ in range(4):
                channel.send(np.zeros(3, dtype=np.int64))
            with pytest.raises(RankLostError, match="rank 1 has not taken"):
                channel.send(np.zeros(3, dtype=np.int64))

    as_threads(2, one_rank)


def test_wrong_use_is_refused(as_threads: AsThreads) -> None:
    def one_rank(group: Any) -> None:
        channel = channel_of("wrong", group)
        if group.rank == 0:
            with pytest.raises(ValueError, match="int32"):
                channel.send(np.zeros(3, dtype=np.int32))  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="2-D"):
                channel.send(np.zeros((3, 3), dtype=np.int64))
            with pytest.raises(ValueError, match="rank 0 sends"):
                channel.receive(lambda: None)
        else:
            with pytest.raises(ValueError, match="rank 1 cannot send"):
                channel.send(np.zeros(3, dtype=np.int64))

    as_threads(2, one_rank)


def test_one_rank_has_nobody_to_tell() -> None:
    channel = make_step_channel(RankContext(0, 1, 0, 1, "single"))
    assert isinstance(channel, SingleStepChannel)
    assert channel.num_receivers == 0, "nothing is encoded for nobody"
    channel.send(np.zeros(3, dtype=np.int64))
    with pytest.raises(ValueError, match="rank 0 sends"):
        channel.receive(lambda: None)
