"""The exchanges among eight real processes with heads that do not divide evenly."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attention.layout import shard_range

PROGRAM = Path(__file__).parent / "rank_programs" / "eight_rank_exchanges.py"
SIZE, HEADS = 8, (20, 9, 5)
Entries = dict[tuple[str, str, int], dict[int, dict]]


@pytest.fixture(scope="module")
def entries() -> Entries:
    """What each rank found, by (kind, exchange, heads)."""
    finished = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    found: Entries = {}
    for line in finished.stdout.splitlines():
        entry = json.loads(line)
        key = entry["kind"], entry["exchange"], entry["heads"]
        found.setdefault(key, {})[entry["rank"]] = entry
    return found


@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("exchange", ["a2a", "ag_rs"])
@pytest.mark.parametrize("kind", ["shared_memory", "gloo"])
def test_every_rank_gets_its_heads_merged(entries, kind, exchange, num_heads):
    of_ranks = entries[kind, exchange, num_heads]
    assert sorted(of_ranks) == list(range(SIZE))
    for rank, entry in of_ranks.items():
        assert entry["shape"] == [3, len(shard_range(num_heads, rank, SIZE)), 24]
        assert entry["error"] <= 1e-5, entry


def test_nothing_else_was_tried(entries):
    assert set(entries) == set(
        itertools.product(["shared_memory", "gloo"], ["a2a", "ag_rs"], HEADS)
    )
