"""Things made out of files, made anew when the files change."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvbraid.errors import ConfigError

logger = logging.getLogger(__name__)

Made = TypeVar("Made")

# Between two looks at files that cannot be used and do not change.
_RETRY_S = 10.0

_Stamp = tuple[tuple[int, int, int] | None, ...]


class Reloaded(Generic[Made]):
    """What `make` makes of `paths`. Thread-safe: gRPC asks from threads of its own.

    A renewal replaces several files one after the other, or all at once behind a link: whatever
    cannot be used (half of it may be old) leaves the last good one in place, with one warning. It
    is tried again now and then: a certificate may not be valid yet.
    """

    def __init__(
        self,
        paths: Sequence[str],
        make: Callable[[], Made],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: seconds, monotonic. Raises ConfigError, from `make`, when the files cannot be used
        to begin with."""
        self._paths = tuple(paths)
        self._make = make
        self._lock = threading.Lock()
        self._seen = self._stamp()
        self._fault = ""
        self._clock = clock
        self._tried_s = clock()
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
        is_due = bool(self._fault) and self._clock() - self._tried_s >= _RETRY_S
        if stamp != self._seen or is_due:
            self._remake(stamp)

    def _remake(self, stamp: _Stamp) -> None:
        self._tried_s = self._clock()
        try:
            made = self._make()
        except ConfigError as error:
            if stamp != self._seen or str(error) != self._fault:
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
