"""`python -m kvbraid.worker.host_ranks`: this host's ranks of a worker that spans hosts.

A LeaderWorkerSet pod is a host. Every host runs this with its own --host-index; the hosts wait
for each other (`host_meeting`), then each starts its ranks with torchrun's variables: host i of
n ranks has the ranks i*n to i*n + n - 1. Rank r listens on --port plus its number on this host,
so that all pods look alike. SIGTERM goes to rank 0, which drains for all; the others end with it.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from kvbraid.engine.ranks import PARENT_VARIABLE, RUN_ID_VARIABLE, RankContext, SpawnedRanks
from kvbraid.errors import ConfigError, StartupError
from kvbraid.rpc.lifecycle import EXIT_STARTUP_REFUSED
from kvbraid.worker.host_meeting import MeetingPlan, meet_hosts

_POLL_S = 0.1
# After one rank has ended, its heartbeats end the others; this long until they are killed.
_STOP_GRACE_S = 5.0
_SIGNALLED = 128


@dataclass(frozen=True, slots=True)
class HostPlan:
    """What this host starts. The meeting takes the port after `master_port`."""

    host_index: int
    num_hosts: int
    ranks_per_host: int
    leader: str
    port: int
    master_port: int
    meeting_seconds: float
    command: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.num_hosts < 1 or not 0 <= self.host_index < self.num_hosts:
            raise ConfigError(f"host index {self.host_index} is outside [0, {self.num_hosts})")
        if self.ranks_per_host < 1:
            raise ConfigError(f"ranks per host is {self.ranks_per_host}, accepted: >= 1")
        if self.port <= self.first_rank:
            raise ConfigError(f"port {self.port} must be above the first rank, {self.first_rank}")

    @property
    def first_rank(self) -> int:
        """Global number of this host's first rank."""
        return self.host_index * self.ranks_per_host

    @property
    def meeting(self) -> MeetingPlan:
        """How the hosts wait for each other."""
        return MeetingPlan(
            self.host_index,
            self.num_hosts,
            self.ranks_per_host,
            self.leader,
            self.master_port + 1,
            self.meeting_seconds,
        )

    def argv(self) -> list[str]:
        """A rank's command line. A worker's rank r listens on its port + r."""
        return [sys.executable, "-m", *self.command, f"--port={self.port - self.first_rank}"]

    def variables(self, local_rank: int) -> dict[str, str]:
        """What `engine.ranks.from_environment` reads."""
        return {
            "RANK": str(self.first_rank + local_rank),
            "WORLD_SIZE": str(self.num_hosts * self.ranks_per_host),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "MASTER_ADDR": self.leader,
            "MASTER_PORT": str(self.master_port),
        }


def run_ranks(plan: HostPlan) -> int:
    """Start the ranks and wait until all have ended; returns the exit code of the first that
    failed, 0 when none did. To be called by the main thread: it takes SIGTERM and SIGINT."""
    ranks = _start(plan)

    def forward(number: int, frame: FrameType | None) -> None:
        del frame
        ranks.processes[0].send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    failed = 0
    while failed == 0 and any(process.poll() is None for process in ranks.processes):
        failed = _first_failure(ranks.processes)
        time.sleep(_POLL_S)
    ranks.stop(_STOP_GRACE_S)
    return failed or _first_failure(ranks.processes)


def _start(plan: HostPlan) -> SpawnedRanks:
    run_id = f"{os.getpid()}-{secrets.token_hex(4)}"
    context = RankContext(
        plan.first_rank,
        plan.num_hosts * plan.ranks_per_host,
        0,
        plan.ranks_per_host,
        run_id,
        plan.leader,
        plan.master_port,
    )
    # Children inherit them; this process reads no environment of its own.
    os.putenv(RUN_ID_VARIABLE, run_id)
    os.putenv(PARENT_VARIABLE, str(os.getpid()))
    processes = []
    for local_rank in range(plan.ranks_per_host):
        for name, value in plan.variables(local_rank).items():
            os.putenv(name, value)
        processes.append(subprocess.Popen(plan.argv(), stdin=subprocess.DEVNULL))
    return SpawnedRanks(context, tuple(processes))


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    codes = [process.poll() for process in processes]
    failed = next((code for code in codes if code), 0)
    return failed if failed >= 0 else _SIGNALLED - failed


def parse_plan(argv: Sequence[str] | None = None) -> HostPlan:
    """The plan that the command line describes. Raises ConfigError for one that cannot be."""
    parser = argparse.ArgumentParser(prog="host_ranks", description=__doc__, allow_abbrev=False)
    parser.add_argument("--host-index", type=int, required=True, help="0 is rank 0's host")
    parser.add_argument("--num-hosts", type=int, required=True)
    parser.add_argument("--ranks-per-host", type=int, required=True)
    parser.add_argument("--leader", required=True, help="host name or address of host 0")
    parser.add_argument("--port", type=int, required=True, help="port of each host's first rank")
    parser.add_argument("--master-port", type=int, default=29500, help="and the one after it")
    parser.add_argument("--meeting-seconds", type=float, default=1800.0)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="SERVICE_MODULE [flags]")
    given = vars(parser.parse_args(argv))
    given["command"] = tuple(given["command"])
    if not given["command"]:
        parser.error("the service module to run is missing")
    return HostPlan(**given)


def main(argv: Sequence[str] | None = None) -> int:
    """Meet the other hosts, run this host's ranks; returns the exit code."""
    try:
        plan = parse_plan(argv)
        meet_hosts(plan.meeting)
        return run_ranks(plan)
    except StartupError as error:
        sys.stderr.write(f"kvbraid host_ranks: {error}\n")
        return EXIT_STARTUP_REFUSED


if __name__ == "__main__":
    sys.exit(main())
