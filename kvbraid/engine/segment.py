"""Memory shared by the ranks of one host: a /dev/shm file that loses its name once all have it.

Group rank 0 creates the file under a temporary name and renames it, so that nobody sees half of
one. Once every rank has mapped it, rank 0 removes the name and only then lets the others go on:
a worker that is killed later leaves nothing behind, and a file that can be found is never one
that an earlier run completed.
"""

from __future__ import annotations

import mmap
import os
import platform
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvbraid.engine.rank_lost import RankLostError
from kvbraid.errors import StartupError

HEADER_BYTES = 4096
MAX_RANKS = 256
_DIRECTORY = Path("/dev/shm")
_PREFIX = "kvbraid-"
_MAGIC = 0x4B56427261696431
_MAGIC_WORD, _BYTES_WORD, _RANKS_WORD, _READY_WORD, _FIRST_ATTACHED_WORD = 0, 1, 2, 3, 8
_POLL_S = 0.001
_STALE_AFTER_S = 300.0


class MemoryFence:
    """Calling it orders this thread's loads and stores before it and after it.

    x86 keeps the order that shared memory needs; elsewhere releasing a lock and acquiring it again
    does. One thread uses an instance.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._is_needed = platform.machine() not in ("x86_64", "AMD64", "i686")

    def __call__(self) -> None:
        if self._is_needed:
            self._lock.release()
            self._lock.acquire()


def no_check() -> None:
    """Nothing to check while waiting."""


def map_segment(
    name: str,
    *,
    num_bytes: int,
    rank: int,
    size: int,
    timeout_s: float,
    check: Callable[[], None] = no_check,
) -> mmap.mmap:
    """Maps `num_bytes` of zeroed memory shared by the `size` ranks that give the same name.

    The memory is freed when the last rank has dropped the mapping. The first HEADER_BYTES belong
    to this module. `check` is called while waiting and may raise.
    Raises RankLostError when a rank has not come within timeout_s, StartupError when /dev/shm has
    no room or the ranks disagree about the size.
    """
    if size > MAX_RANKS:
        raise StartupError(f"{size} ranks share memory on one host; at most {MAX_RANKS} can")
    deadline = time.monotonic() + timeout_s
    path = _DIRECTORY / f"{_PREFIX}{name}"
    if rank == 0:
        return _create(path, num_bytes, size, deadline, check)
    return _attach(path, num_bytes, rank, size, deadline, check)


def remove_segments(run_id: str) -> None:
    """Removes the names that the run has left in /dev/shm, if any."""
    for path in _DIRECTORY.glob(f"{_PREFIX}{run_id}-*"):
        path.unlink(missing_ok=True)


def remove_stale_segments() -> None:
    """Removes names left by runs whose rank 0 is dead, once they are 5 minutes old."""
    for path in _DIRECTORY.glob(f"{_PREFIX}*"):
        match = re.match(rf"{_PREFIX}(\d+)-[0-9a-f]{{8}}-", path.name)
        if match is None or Path(f"/proc/{match[1]}").exists():
            continue
        try:
            age_s = time.time() - path.stat().st_mtime
        except FileNotFoundError:
            continue
        if age_s > _STALE_AFTER_S:
            path.unlink(missing_ok=True)


def _create(
    path: Path, num_bytes: int, size: int, deadline: float, check: Callable[[], None]
) -> mmap.mmap:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with draft.open("xb+") as file:
            # Reserved now: writing to a sparse file on a full tmpfs is a SIGBUS later.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            memory = mmap.mmap(file.fileno(), num_bytes)
        words = memoryview(memory).cast("q")
        words[_BYTES_WORD], words[_RANKS_WORD] = num_bytes, size
        words[_MAGIC_WORD] = _MAGIC
        draft.rename(path)
        for rank in range(1, size):
            _wait(
                lambda rank=rank: words[_FIRST_ATTACHED_WORD + rank] == 1,  # type: ignore[misc]
                deadline,
                check,
                f"rank {rank} has not mapped {path}",
            )
    except OSError as error:
        raise StartupError(
            f"cannot make {path} of {num_bytes} bytes ({error.strerror}); give the container a "
            "larger /dev/shm"
        ) from error
    finally:
        draft.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    words[_READY_WORD] = 1
    return memory


def _attach(
    path: Path, num_bytes: int, rank: int, size: int, deadline: float, check: Callable[[], None]
) -> mmap.mmap:
    inode = -1
    memory: mmap.mmap | None = None

    def is_ready() -> bool:
        nonlocal inode, memory
        # A file of a dead run may lie under the name until rank 0 replaces it: look again.
        if (found := _open(path, inode)) is not None:
            inode, memory = found
            words = memoryview(memory).cast("q")
            if (words[_BYTES_WORD], words[_RANKS_WORD]) == (num_bytes, size):
                words[_FIRST_ATTACHED_WORD + rank] = 1
        return memory is not None and memoryview(memory).cast("q")[_READY_WORD] == 1

    _wait(is_ready, deadline, check, f"rank 0 has not made {path} of {num_bytes} bytes for {size}")
    assert memory is not None
    return memory


def _open(path: Path, known_inode: int) -> tuple[int, mmap.mmap] | None:
    try:
        if path.stat().st_ino == known_inode:
            return None
        with path.open("rb+") as file:
            status = os.fstat(file.fileno())
            if status.st_size < HEADER_BYTES:
                return None
            return status.st_ino, mmap.mmap(file.fileno(), status.st_size)
    except FileNotFoundError:
        return None


def _wait(
    is_done: Callable[[], bool], deadline: float, check: Callable[[], None], complaint: str
) -> None:
    while not is_done():
        check()
        if time.monotonic() > deadline:
            raise RankLostError(f"{complaint} in time")
        time.sleep(_POLL_S)
