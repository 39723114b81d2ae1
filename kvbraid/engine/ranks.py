"""Which rank this process is, and how the ranks of a worker on one host are started and ended.

Ranks are spawned, never forked, with the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), so one host, a LeaderWorkerSet and torchrun look alike.
A spawned rank dies with its parent (PR_SET_PDEATHSIG). Linux only. Knows no torch.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbraid.engine.rank_lost import RankLostError
from kvbraid.engine.segment import remove_segments, remove_stale_segments
from kvbraid.errors import ConfigError

RUN_ID_VARIABLE = "RANK_RUN_ID"
PARENT_VARIABLE = "RANK_PARENT_PID"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank of a worker.

    run_id names the run in /dev/shm: equal on all its ranks, different from any other run on the
    host. master_addr and master_port are where torch.distributed meets, when it is used at all.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    run_id: str
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(f"RANK {self.rank} is outside [0, WORLD_SIZE {self.world_size})")
        if not 0 <= self.local_rank < self.local_world_size <= self.world_size:
            raise ConfigError(
                f"LOCAL_RANK {self.local_rank} is outside [0, LOCAL_WORLD_SIZE "
                f"{self.local_world_size}), which is at most WORLD_SIZE {self.world_size}"
            )
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", self.run_id):
            raise ConfigError(f"run id {self.run_id!r} must be 1-100 of letters, digits, '_.-'")

    @property
    def is_one_host(self) -> bool:
        """Whether every rank runs on this host."""
        return self.local_world_size == self.world_size

    @property
    def local_ranks(self) -> range:
        """The ranks on this host."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)


def from_environment(environment: Mapping[str, str] = os.environ) -> RankContext | None:
    """The rank that the environment names, or None when RANK is not set.

    Binds the life of a spawned rank to its parent's, so call it first thing in the process.
    Raises ConfigError naming the variable that is missing or malformed.
    """
    if "RANK" not in environment:
        return None
    rank, world_size = _integer(environment, "RANK"), _integer(environment, "WORLD_SIZE")
    local_rank = _integer(environment, "LOCAL_RANK", default=rank)
    local_world_size = _integer(environment, "LOCAL_WORLD_SIZE", default=world_size)
    address = environment.get("MASTER_ADDR", "127.0.0.1")
    port = _integer(environment, "MASTER_PORT", default=0)
    run_id = environment.get(RUN_ID_VARIABLE) or re.sub(r"[^A-Za-z0-9.-]", "_", f"{address}-{port}")
    if PARENT_VARIABLE in environment:
        _die_with(_integer(environment, PARENT_VARIABLE))
    return RankContext(rank, world_size, local_rank, local_world_size, run_id, address, port)


def _integer(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None:
        if default is None:
            raise ConfigError(f"{name} must be set when RANK is")
        return default
    if not re.fullmatch(r"\d{1,9}", text):
        raise ConfigError(f"{name}={text!r} must be an integer of at least 0")
    return int(text)


def _die_with(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "prctl(PR_SET_PDEATHSIG)")
    # The parent may have died before the request was in force; then nobody sends the signal.
    if os.getppid() != parent:
        raise RankLostError(f"the parent of this rank, pid {parent}, is gone")


def start_run(world_size: int) -> RankContext:
    """Rank 0 of a new run on this host; removes what dead runs left in /dev/shm."""
    remove_stale_segments()
    run_id = f"{os.getpid()}-{secrets.token_hex(4)}"
    port = _free_port() if world_size > 1 else 0
    return RankContext(0, world_size, 0, world_size, run_id, "127.0.0.1", port)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True, slots=True)
class SpawnedRanks:
    """Ranks 1.. of a run, children of this process."""

    context: RankContext
    processes: tuple[subprocess.Popen[bytes], ...]

    def check_alive(self) -> None:
        """Raises RankLostError naming the first rank that has ended. For use while starting."""
        for rank, process in enumerate(self.processes, start=1):
            if process.poll() is not None:
                raise RankLostError(f"rank {rank} ended with exit code {process.returncode}")

    def stop(self, grace_s: float) -> tuple[int, ...]:
        """Waits grace_s seconds for the ranks to end by themselves, then kills them.

        Returns their exit codes (-9 = had to be killed). The ranks must have been told to end.
        """
        deadline = time.monotonic() + grace_s
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        codes = tuple(process.wait() for process in self.processes)
        remove_segments(self.context.run_id)
        return codes


def spawn_ranks(
    argv: Sequence[str],
    context: RankContext,
    *,
    environment: Mapping[str, str] = os.environ,
) -> SpawnedRanks:
    """Starts `argv` once for each rank above 0 of `context`, a run made by `start_run`.

    Call it from a thread that lives as long as the worker: the kernel kills the children when the
    thread that started them ends. Each child finds its rank through `from_environment`.
    """
    return SpawnedRanks(
        context,
        tuple(
            subprocess.Popen(
                list(argv),
                env={**environment, **_variables(context, rank)},
                stdin=subprocess.DEVNULL,
            )
            for rank in range(1, context.world_size)
        ),
    )


def _variables(context: RankContext, rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(context.world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(context.world_size),
        "MASTER_ADDR": context.master_addr,
        "MASTER_PORT": str(context.master_port),
        RUN_ID_VARIABLE: context.run_id,
        PARENT_VARIABLE: str(os.getpid()),
    }
