"""The staging ring and its shared memory."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbraid.transport.staging import (
    SharedMemory,
    StagingRing,
    host_id,
    remove_stale_rings,
    slot_path,
)


def test_ring_hands_out_each_slot_once() -> None:
    ring = StagingRing(2, 8)
    first, second = ring.acquire(), ring.acquire()
    assert {first, second} == {0, 1}
    assert ring.acquire() is None
    ring.release(1)
    assert ring.acquire() == 1


def test_slots_do_not_overlap() -> None:
    ring = StagingRing(3, 8)
    for slot in range(3):
        ring.view(slot)[:] = bytes([slot]) * 8
    assert [bytes(ring.view(slot)) for slot in range(3)] == [bytes([s]) * 8 for s in range(3)]


def test_late_writer_of_a_replaced_slot_writes_to_memory_that_nobody_reads(tmp_path: Path) -> None:
    """serving.md 3.1: a writer that outlives its slot cannot touch the next transfer's rows."""
    ring = StagingRing(1, 4096, SharedMemory(4096, tmp_path))
    slot = ring.acquire()
    assert slot is not None
    with slot_path(ring.ring_name, slot, tmp_path).open("r+b") as late_writer:
        ring.replace(slot)
        fresh = ring.acquire()
        assert fresh is not None
        assert fresh != slot
        late_writer.write(b"late")
        late_writer.flush()
    assert bytes(ring.view(fresh)) == bytes(4096)
    with pytest.raises(KeyError):
        ring.view(slot)
    ring.close()


def test_shared_slot_is_seen_through_its_file(tmp_path: Path) -> None:
    ring = StagingRing(2, 4096, SharedMemory(4096, tmp_path))
    with slot_path(ring.ring_name, 1, tmp_path).open("r+b") as file:
        file.write(b"rows")
    assert bytes(ring.view(1)[:4]) == b"rows"
    ring.close()


def test_closed_ring_leaves_no_file_and_keeps_staged_rows_readable(tmp_path: Path) -> None:
    ring = StagingRing(2, 8, SharedMemory(8, tmp_path))
    held = ring.acquire()
    assert held is not None
    ring.view(held)[:4] = b"rows"
    ring.close()
    assert list(tmp_path.iterdir()) == []
    assert bytes(ring.view(held)[:4]) == b"rows"
    ring.replace(held)
    ring.release(1)
    assert ring.acquire() is None


def test_slots_are_private_to_the_user(tmp_path: Path) -> None:
    ring = StagingRing(1, 8, SharedMemory(8, tmp_path))
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    ring.close()


def test_rings_of_dead_processes_are_removed_and_living_ones_kept(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path\n"
        "from kvbraid.transport.staging import SharedMemory, StagingRing\n"
        "ring = StagingRing(2, 8, SharedMemory(8, Path(sys.argv[1])))\n"
        "sys.stdout.write(ring.ring_name); sys.stdout.flush(); os._exit(9)"
    )
    dead = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    ).stdout
    living = StagingRing(1, 8, SharedMemory(8, tmp_path))
    assert len(list(tmp_path.glob(f"{dead}.*"))) == 3
    assert remove_stale_rings(tmp_path) == [dead]
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{living.ring_name}.lock",
        f"{living.ring_name}.0",
    }
    living.close()


def test_lock_is_held_as_long_as_the_ring(tmp_path: Path) -> None:
    ring = StagingRing(1, 8, SharedMemory(8, tmp_path))
    fd = os.open(tmp_path / f"{ring.ring_name}.lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    ring.close()
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


@pytest.mark.parametrize("name", ["", "other", "kvbraid-ring-/../x", "/etc/passwd"])
def test_names_of_a_peer_cannot_leave_the_ring_folder(name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a staging ring"):
        slot_path(name, 0)


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(0, 8), (2, 0)])
def test_impossible_rings_are_refused(num_slots: int, slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="both must be >= 1"):
        StagingRing(num_slots, slot_bytes)


def test_host_id_is_stable_in_one_host() -> None:
    assert host_id() == host_id() != ""
