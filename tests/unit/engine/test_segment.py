"""Shared memory loses its name once all ranks have it, and old files fool nobody."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbraid.engine.rank_lost import RankLostError
from kvbraid.engine.segment import map_segment, remove_segments, remove_stale_segments
from kvbraid.errors import StartupError

AsThreads = Callable[[int, Callable[..., Any]], list[Any]]
NUM_BYTES = 8192
RUN = f"{os.getpid()}-0a0b0c0d"


def path_of(name: str) -> Path:
    return Path(f"/dev/shm/kvbraid-{name}")


def test_ranks_share_zeroed_memory_without_a_name(as_threads: AsThreads) -> None:
    name = f"{RUN}-share"

    def one_rank(group: Any) -> bytes:
        memory = map_segment(name, num_bytes=NUM_BYTES, rank=group.rank, size=3, timeout_s=20)
        assert not path_of(name).exists()
        assert bytes(memory[4096:]) == bytes(4096)
        group.barrier()
        memory[5000 + group.rank] = 10 + group.rank
        group.barrier()
        return bytes(memory[5000:5003])

    assert as_threads(3, one_rank) == [bytes([10, 11, 12])] * 3


def test_a_file_of_a_dead_run_is_not_mistaken_for_the_new_one(as_threads: AsThreads) -> None:
    name = f"{RUN}-old"
    attached_to_old = threading.Event()
    rank_zero_may_start = threading.Event()

    def leave_old() -> None:
        # A run that was killed while it waited for its ranks.
        with pytest.raises(RankLostError):
            map_segment(name, num_bytes=NUM_BYTES, rank=0, size=3, timeout_s=0.05)

    leave_old()
    path_of(name).write_bytes(b"\xff" * NUM_BYTES)

    def one_rank(group: Any) -> bytes:
        def look() -> None:
            attached_to_old.set()
            rank_zero_may_start.wait(10)

        if group.rank == 0:
            assert attached_to_old.wait(10)
            rank_zero_may_start.set()
            memory = map_segment(name, num_bytes=NUM_BYTES, rank=0, size=2, timeout_s=20)
            memory[6000] = 77
        else:
            memory = map_segment(
                name, num_bytes=NUM_BYTES, rank=1, size=2, timeout_s=20, check=look
            )
        group.barrier()
        return bytes(memory[6000:6001])

    assert as_threads(2, one_rank) == [b"\x4d"] * 2
    assert not path_of(name).exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_comes_is_lost_and_leaves_no_file(rank: int) -> None:
    name = f"{RUN}-alone"
    with pytest.raises(RankLostError, match=f"kvbraid-{name}"):
        map_segment(name, num_bytes=NUM_BYTES, rank=rank, size=2, timeout_s=0.05)
    assert not list(Path("/dev/shm").glob(f"kvbraid-{name}*"))


def test_ranks_that_disagree_about_the_size_do_not_start(as_threads: AsThreads) -> None:
    name = f"{RUN}-differ"

    def one_rank(group: Any) -> None:
        num_bytes = NUM_BYTES * (1 + group.rank)
        with pytest.raises(RankLostError, match="kvbraid"):
            map_segment(name, num_bytes=num_bytes, rank=group.rank, size=2, timeout_s=0.3)

    as_threads(2, one_rank)


def test_waiting_ends_when_the_check_raises() -> None:
    def check() -> None:
        raise RankLostError("rank 1 ended with exit code 3")

    name = f"{RUN}-check"
    with pytest.raises(RankLostError, match="exit code 3"):
        map_segment(name, num_bytes=NUM_BYTES, rank=0, size=2, timeout_s=60, check=check)
    assert not path_of(name).exists()


def test_too_small_a_shared_memory_is_a_startup_error() -> None:
    free = os.statvfs("/dev/shm")
    too_much = (free.f_blocks + 1024) * free.f_frsize
    name = f"{RUN}-large"
    with pytest.raises(StartupError, match="larger /dev/shm"):
        map_segment(name, num_bytes=too_much, rank=0, size=2, timeout_s=5)
    assert not list(Path("/dev/shm").glob(f"kvbraid-{name}*"))


def test_files_of_dead_runs_are_removed_and_others_stay() -> None:
    finished = subprocess.Popen(["true"])
    finished.wait()
    dead, young, alive, foreign = (
        path_of(f"{finished.pid}-0a0b0c0d-tp"),
        path_of(f"{finished.pid}-0a0b0c0d-young"),
        path_of(f"{RUN}-alive"),
        path_of("worker-0-29500-tp"),
    )
    paths = (dead, young, alive, foreign)
    try:
        for path in paths:
            path.touch()
            if path is not young:
                os.utime(path, (0, 0))
        remove_stale_segments()
        assert [path.exists() for path in paths] == [False, True, True, True]
        remove_segments(RUN)
        assert [path.exists() for path in paths] == [False, True, False, True]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
