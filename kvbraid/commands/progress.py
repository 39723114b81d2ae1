"""A progress bar on stderr; a line now and then where stderr is no terminal."""

from __future__ import annotations

import sys
from typing import Self, TextIO

_WIDTH = 30


class ProgressBar:
    """Shows how much of a known number of bytes is done."""

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._shown_tenths = -1

    def update(self, done: int, total: int) -> None:
        """`done` of `total` bytes; a total of 0 means unknown."""
        if total <= 0:
            return
        tenths = done * (1000 if self._is_terminal else 10) // total
        if tenths == self._shown_tenths:
            return
        self._shown_tenths = tenths
        share = min(1.0, done / total)
        bar = "#" * round(share * _WIDTH)
        line = f"{self._label} [{bar:{_WIDTH}}] {share:4.0%} of {total / 1e6:.1f} MB"
        self._stream.write(f"\r{line}" if self._is_terminal else f"{line}\n")
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal and self._shown_tenths >= 0:
            self._stream.write("\n")
