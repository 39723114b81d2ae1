"""Reads back the rows of result files by the names of their cases."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.report import BenchmarkRow

RESULTS = Path(__file__).with_name("results")


class ResultRows:
    """The rows of one result file. A case that is missing raises KeyError with the file's name."""

    def __init__(self, name: str, rows: Sequence[BenchmarkRow]) -> None:
        self._name = name
        self._rows = {row.case: row for row in rows}

    @classmethod
    def load(cls, path: Path) -> ResultRows:
        """Of a file that `write_report` wrote."""
        report = json.loads(path.read_text(encoding="utf-8"))
        return cls(path.name, [BenchmarkRow(**row) for row in report["rows"]])

    def row(self, case: str) -> BenchmarkRow:
        """The row of exactly this case."""
        if case not in self._rows:
            raise KeyError(f"{self._name} has no case {case!r}")
        return self._rows[case]

    def matching(self, pattern: str) -> Iterator[tuple[re.Match[str], BenchmarkRow]]:
        """Rows whose whole case matches, in the file's order; at least one."""
        pairs = [(re.fullmatch(pattern, case), row) for case, row in self._rows.items()]
        found = [(match, row) for match, row in pairs if match]
        if not found:
            raise KeyError(f"{self._name} has no case like {pattern!r}")
        yield from found
