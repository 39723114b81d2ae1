"""Things made out of files, made anew when the files change."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvbraid.errors import ConfigError

logger = logging.getLogger(__name__)

Made = TypeVar("Made")

_Stamp = tuple[tuple[int, int, int] | None, ...]


class Reloaded(Generic[Made]):
    """What `make` makes of `paths`. Thread-safe: gRPC asks from threads of its own.

    A renewal replaces several files one after the other, or all at once behind a link: whatever
    cannot be used (half of it may be old) leaves the last good one in place, with one warning.
    """

    def __init__(self, paths: Sequence[str], make: Callable[[], Made]) -> None:
        """Raises ConfigError, from `make`, when the files cannot be used to begin with."""
        self._paths = tuple(paths)
        self._make = make
        self._lock = threading.Lock()
        self._seen = self._stamp()
        self._fault = ""
        self._current = make()

    def current(self) -> Made:
        """The newest that could be made; the same object until the files change."""
        with self._lock:
            self._look()
            return self._current

    def fault(self) -> str:
        """Why the files that are there now are not those of `current`; "" when they are."""
        with self._lock:
            self._look()
            return self._fault

    def _look(self) -> None:
        stamp = self._stamp()
        if stamp != self._seen:
            self._remake(stamp)

    def _remake(self, stamp: _Stamp) -> None:
        try:
            made = self._make()
        except ConfigError as error:
            logger.warning("changed files are not used, the old ones still are: %s", error)
            self._seen, self._fault = stamp, str(error)
            return
        if self._stamp() != stamp:
            return  # replaced while they were read: asked for again at the next call
        self._seen, self._fault, self._current = stamp, "", made
        logger.info("read again: %s", ", ".join(self._paths))

    def _stamp(self) -> _Stamp:
        return tuple(_file_stamp(path) for path in self._paths)


def _file_stamp(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
