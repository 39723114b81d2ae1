"""What the speculation benchmark makes of its samples."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.clusters import _pin
from benchmarks.service_streams import DraftCounts, Sample, Stream
from benchmarks.speculation_rows import control_row, rows_of


def sample(num_tokens: int, seconds: float) -> Sample:
    """One stream of so many tokens, two of them from a window of three drafts."""
    return Sample((Stream(tuple(range(num_tokens)), ((3, 1),), num_tokens - 1),), seconds)


def test_groups_that_ran_one_after_the_other_are_one_sample() -> None:
    joined = Sample.joined([sample(10, 1.0), sample(30, 3.0)])
    assert (joined.num_tokens, joined.seconds, joined.rate) == (40, 4.0, 10.0)
    counts = DraftCounts.of([joined])
    assert (counts.num_windows, counts.num_verified, counts.num_accepted) == (2, 6, 2)
    assert counts.num_steps == 38


def test_the_control_is_reported_and_has_no_bar() -> None:
    pairs = [(sample(10, 1.0), sample(10, seconds)) for seconds in (1.0, 2.0, 0.5)]
    row = control_row("model control x1", pairs)
    assert (row.ratio, row.bar, row.holds) == (1.0, None, True)
    assert (row.ours, row.peer) == (10.0, 10.0)


def test_tokens_are_compared_with_the_first_plain_cluster_s_and_rates_with_both() -> None:
    plain, other, drafted = sample(10, 1.0), sample(12, 1.2), sample(10, 0.5)
    pairs = [(Sample.joined([plain, other]), drafted)]
    rows = {row.case: row for row in rows_of("m", pairs, bar=1.9, floor=None, is_exact=True)}
    assert rows["m: streams with equal tokens"].ratio == 1.0
    median = rows["m: tokens/s with drafts / plain, median of 1 pairs"]
    assert (median.ours, median.peer, median.holds) == (20.0, 10.0, True)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="NOT CHECKED: a single core")
def test_all_threads_of_a_process_are_given_its_cores() -> None:
    program = (
        "import os, sys, threading\n"
        "def stay():\n"
        "    sys.stdin.readline()\n"
        "threading.Thread(target=stay, daemon=True).start()\n"
        "print('ready', flush=True)\n"
        "threading.Event().wait()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        one = sorted(os.sched_getaffinity(0))[:1]
        _pin(process.pid, one)
        threads = [int(name) for name in os.listdir(f"/proc/{process.pid}/task")]
        assert len(threads) == 2
        assert all(os.sched_getaffinity(thread) == set(one) for thread in threads)
        process.kill()
