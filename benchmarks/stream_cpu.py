"""CPU time that a token costs the coordinator and a decode worker's event loop.

python -m benchmarks.stream_cpu --streams 64 --step-seconds 0.003 --tokens 1000

The decode worker's engine is a clock (benchmarks.clock_worker): each stream gets a token a step.
All streams run over gRPC from one process. A step that is too short for this machine shows what is
served where the coordinator is the limit; a long one, such as 0.032, what a message costs. CPU
times, unlike wall times, may be taken beside other work; compare checkouts by medians of runs in
turn.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks.service_streams import Sample, run_streams
from kvbraid.cluster.local_cluster import SERVICE_COMMANDS, ClusterSpec, LocalCluster

MODEL = Path(__file__).parents[1] / "tests" / "assets" / "tiny-mla"
_START_S = 60.0


class CpuTimes(NamedTuple):
    """Seconds that a process has run: all of its threads, and its main one, where the loop is."""

    process: float
    loop: float

    @classmethod
    def of(cls, pid: int) -> CpuTimes:
        """Until now."""
        seconds = {
            thread.name: int((thread / "schedstat").read_text().split()[0]) / 1e9
            for thread in Path(f"/proc/{pid}/task").iterdir()
        }
        return cls(sum(seconds.values()), seconds[str(pid)])


def measure(
    num_streams: int, num_tokens: int, step_s: float
) -> tuple[Sample, dict[str, tuple[float, float]]]:
    """The streams, and by process the microseconds a token of all its threads and of its loop."""
    clock = (sys.executable, "-m", "benchmarks.clock_worker", f"--step-seconds={step_s}")
    spec = ClusterSpec(model=str(MODEL), prefill=(), commands={**SERVICE_COMMANDS, "decode": clock})
    with LocalCluster(spec) as cluster:
        cluster.start(timeout_s=_START_S)
        address = cluster.coordinator.grpc
        run_streams(address, ["warm"] * num_streams, 10)
        before = {name: CpuTimes.of(child.pid) for name, child in cluster.children.items()}
        sample = run_streams(address, ["Count."] * num_streams, num_tokens)
        after = {name: CpuTimes.of(child.pid) for name, child in cluster.children.items()}
    us = 1e6 / sample.num_tokens
    return sample, {
        name: ((after[name].process - was.process) * us, (after[name].loop - was.loop) * us)
        for name, was in before.items()
    }


def main() -> None:
    """Prints one line a process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1000, help="of a stream")
    parser.add_argument("--step-seconds", type=float, default=0.003)
    arguments = parser.parse_args()
    sample, costs = measure(arguments.streams, arguments.tokens, arguments.step_seconds)
    made = arguments.streams / arguments.step_seconds
    print(f"tokens/s served {sample.rate:.0f}, made at most {made:.0f}")
    for name, (process_us, loop_us) in costs.items():
        print(f"{name:12s} {process_us:6.1f} us a token, its event loop {loop_us:6.1f}")


if __name__ == "__main__":
    main()
