"""The ring that arriving rows wait in until the engine thread scatters them.

A slot is its own piece of memory under its own number. When a writer vanishes with a slot in its
hands, the slot is replaced, number and memory: whatever the late writer still writes lands in
memory that nobody reads.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import threading
from collections import deque
from pathlib import Path
from typing import Protocol

RING_PREFIX = "kvbraid-ring-"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SHARED_MEMORY = Path("/dev/shm")


class SlotMemory(Protocol):
    """Where slots live."""

    @property
    def ring_name(self) -> str:
        """Prefix of the slots' files; "" when other processes cannot reach them."""
        ...

    def create(self, slot: int) -> memoryview:
        """Writable memory of slot number `slot`."""
        ...

    def destroy(self, slot: int) -> None:
        """Let go of the slot's memory; writers that mapped it keep their own view of it."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class PrivateMemory:
    """Slots in this process's own memory."""

    ring_name = ""

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes

    def create(self, slot: int) -> memoryview:
        """See SlotMemory."""
        return memoryview(mmap.mmap(-1, self._slot_bytes))

    def destroy(self, slot: int) -> None:
        """See SlotMemory."""

    def close(self) -> None:
        """See SlotMemory."""


class SharedMemory:
    """Slots as files in /dev/shm, for senders of the same host and user.

    A lock file is held locked for the life of the process, so that the next start can tell a
    dead ring from a living one, also between containers that share /dev/shm.
    """

    def __init__(self, slot_bytes: int, directory: Path = SHARED_MEMORY) -> None:
        self._slot_bytes = slot_bytes
        self._directory = directory
        self.ring_name, self._lock_fd = _locked_name(directory)

    def create(self, slot: int) -> memoryview:
        """See SlotMemory."""
        fd = os.open(self._path(slot), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.ftruncate(fd, self._slot_bytes)
            return memoryview(mmap.mmap(fd, self._slot_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE))
        finally:
            os.close(fd)

    def destroy(self, slot: int) -> None:
        """See SlotMemory."""
        self._path(slot).unlink(missing_ok=True)

    def close(self) -> None:
        """See SlotMemory."""
        _unlink_ring(self._directory, self.ring_name)
        os.close(self._lock_fd)

    def _path(self, slot: int) -> Path:
        return slot_path(self.ring_name, slot, self._directory)


class StagingRing:
    """Slots of `slot_bytes` bytes that frames' payloads are staged in. Thread-safe.

    Slot numbers only grow; a number always means the same memory.
    """

    def __init__(self, num_slots: int, slot_bytes: int, memory: SlotMemory | None = None) -> None:
        if num_slots < 1 or slot_bytes < 1:
            raise ValueError(f"{num_slots} slots of {slot_bytes} bytes: both must be >= 1")
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._memory: SlotMemory = memory or PrivateMemory(slot_bytes)
        self._lock = threading.Lock()
        self._views: dict[int, memoryview] = {}
        self._free: deque[int] = deque()
        self._next_slot = 0
        self._is_closed = False
        for _ in range(num_slots):
            self._add_slot()

    @property
    def ring_name(self) -> str:
        """Prefix of the slots' files in /dev/shm; "" when other processes cannot reach them."""
        return self._memory.ring_name

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def acquire(self) -> int | None:
        """A free slot, the caller's until `release` or `replace`; None when there is none."""
        with self._lock:
            return self._free.popleft() if self._free else None

    def view(self, slot: int) -> memoryview:
        """The slot's memory, writable, `slot_bytes` long. Raises KeyError for a dead number."""
        return self._views[slot]

    def release(self, slot: int) -> None:
        """Give a slot back that no writer holds any more."""
        with self._lock:
            if not self._is_closed:
                self._free.append(slot)

    def replace(self, slot: int) -> None:
        """Give a slot back whose writer may still write: fresh memory under a new number."""
        with self._lock:
            if self._is_closed:
                return
            del self._views[slot]
            self._memory.destroy(slot)
            self._add_slot()

    def close(self) -> None:
        """Unlink shared slots and hand out no more. Frames that are staged stay readable."""
        with self._lock:
            self._is_closed = True
            self._free.clear()
            self._memory.close()

    def _add_slot(self) -> None:
        self._views[self._next_slot] = self._memory.create(self._next_slot)
        self._free.append(self._next_slot)
        self._next_slot += 1


def slot_path(ring_name: str, slot: int, directory: Path = SHARED_MEMORY) -> Path:
    """File of a slot. Raises ValueError for a name that is no ring's: it comes from a peer."""
    if not ring_name.startswith(RING_PREFIX) or "/" in ring_name:
        raise ValueError(f"{ring_name!r} is not the name of a staging ring")
    return directory / f"{ring_name}.{slot}"


def ring_lives(ring_name: str, directory: Path = SHARED_MEMORY) -> bool:
    """Whether the ring of this name is in this directory and not closed."""
    return (directory / f"{ring_name}.lock").exists()


def remove_stale_rings(directory: Path = SHARED_MEMORY) -> list[str]:
    """Unlink the rings whose process is gone; returns their names. For a worker's start."""
    removed = []
    for lock in directory.glob(f"{RING_PREFIX}*.lock"):
        try:
            fd = os.open(lock, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            _unlink_ring(directory, lock.stem)
            removed.append(lock.stem)
        finally:
            os.close(fd)
    return removed


def host_id() -> str:
    """Equal in two processes exactly when they see the same /dev/shm."""
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{boot_id}:{SHARED_MEMORY.stat().st_dev}" if SHARED_MEMORY.exists() else ""


def _locked_name(directory: Path) -> tuple[str, int]:
    """A new ring's name and the descriptor that holds its lock file locked."""
    while True:
        name = f"{RING_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(directory / f"{name}.lock", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        # Another process's clean-up may have taken the file for stale before it was locked.
        if os.fstat(fd).st_nlink:
            return name, fd
        os.close(fd)


def _unlink_ring(directory: Path, ring_name: str) -> None:
    for path in directory.glob(f"{ring_name}.*"):
        path.unlink(missing_ok=True)
