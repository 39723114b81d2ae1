"""Memory, open files and threads of processes and their children over time, out of /proc."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one time; cpu_s: used since its start."""

    at: float
    rss_mib: float
    num_fds: float
    num_threads: float
    cpu_s: float


def sample(pid: int) -> Sample:
    """The process now. Raises OSError when it is gone."""
    folder = Path(f"/proc/{pid}")
    # The name in brackets may hold spaces; fields are numbered from 3 behind it.
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return Sample(
        at=time.monotonic(),
        rss_mib=int((folder / "statm").read_text().split()[1]) * _PAGE_BYTES / 2**20,
        num_fds=len(os.listdir(folder / "fd")),
        num_threads=int(fields[17]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS,
    )


def family(pid: int) -> list[int]:
    """The process and its children, grandchildren and so on, in the order of their start."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


class Growth:
    """Samples of named processes; names of children get a number behind."""

    def __init__(self, roots: Mapping[str, int]) -> None:
        """roots: pid by name."""
        self._pids = {
            f"{name}/{number}" if number else name: pid
            for name, root in roots.items()
            for number, pid in enumerate(family(root))
        }
        self._samples: defaultdict[str, list[Sample]] = defaultdict(list)

    def take(self) -> None:
        """One sample of each. Raises OSError when a process is gone."""
        for name, pid in self._pids.items():
            self._samples[name].append(sample(pid))

    @property
    def names(self) -> list[str]:
        """Of all processes."""
        return list(self._pids)

    def per_hour(self, name: str, field: str) -> float:
        """How fast a field of Sample grows: medians of the first and last third of the samples.

        Medians, because what a request holds for a moment is no growth.
        """
        samples = self._samples[name]
        third = max(1, len(samples) // 3)
        first, last = samples[:third], samples[-third:]

        def median(part: list[Sample], of: str) -> float:
            return float(statistics.median(getattr(s, of) for s in part))

        hours = (median(last, "at") - median(first, "at")) / 3600
        return (median(last, field) - median(first, field)) / hours

    def last(self, name: str, field: str) -> float:
        """The newest value of a field of Sample."""
        return float(getattr(self._samples[name][-1], field))

    def cores(self) -> float:
        """CPU time that all processes used a second."""
        pairs = [(samples[0], samples[-1]) for samples in self._samples.values()]
        return sum((b.cpu_s - a.cpu_s) / (b.at - a.at) for a, b in pairs)
