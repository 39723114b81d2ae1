"""JSON logs: one line a record, request id and rank in every one.

    configure_logging(role="decode", rank=0, level="info")
    logging.getLogger(__name__).info("handoff finished", extra={"num_bytes": 4096})

writes {"ts": "2026-01-31T09:30:00.123Z", "level": "info", "role": "decode", "rank": 0,
"request_id": "r-1", "logger": "...", "msg": "handoff finished", "num_bytes": 4096}.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

from kvbraid.telemetry.context import current_request_id

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_RESERVED = frozenset({"ts", "level", "role", "rank", "request_id", "logger", "msg", "error"})


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON; `extra` fields keep their names."""

    def __init__(self, *, role: str, rank: int) -> None:
        super().__init__()
        self._role = role
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        """The line. Values that JSON does not know are written as str(value)."""
        when = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "ts": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "role": self._role,
            "rank": self._rank,
            "request_id": getattr(record, "request_id", "") or current_request_id(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        extra = vars(record).items()
        line |= {key: value for key, value in extra if key not in _STANDARD | _RESERVED}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(
    *, role: str, rank: int = 0, level: str = "info", stream: TextIO | None = None
) -> None:
    """Send every log record of this process to `stream` (stderr) as JSON lines.

    Replaces earlier handlers of the root logger, so a second call changes role, rank or level.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(role=role, rank=rank))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
