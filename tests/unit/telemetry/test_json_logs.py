from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from kvbraid.telemetry.context import bind_request_id, request_context
from kvbraid.telemetry.logging import configure_logging


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    configure_logging(role="decode", rank=3, level="info", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(log: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


def test_a_record_is_one_json_line_with_role_rank_and_fields(log: io.StringIO) -> None:
    logging.getLogger("kvbraid.kv").info("freed %d pages", 4, extra={"num_bytes": 4096})
    (record,) = lines(log)
    assert datetime.fromisoformat(record.pop("ts")).tzinfo is not None
    assert record == {
        "level": "info",
        "role": "decode",
        "rank": 3,
        "request_id": "",
        "logger": "kvbraid.kv",
        "msg": "freed 4 pages",
        "num_bytes": 4096,
    }


def test_newlines_and_tracebacks_stay_on_the_records_line(log: io.StringIO) -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        logging.getLogger("x").exception("it\nbroke")
    (record,) = lines(log)
    assert record["msg"] == "it\nbroke"
    assert "ValueError: first\nsecond" in record["error"]


def test_fields_cannot_forge_role_rank_or_level(log: io.StringIO) -> None:
    logging.getLogger("x").info("hello", extra={"role": "root", "rank": 9, "level": "none"})
    (record,) = lines(log)
    assert (record["role"], record["rank"], record["level"]) == ("decode", 3, "info")


def test_values_unknown_to_json_are_written_as_text(log: io.StringIO) -> None:
    logging.getLogger("x").info("hello", extra={"shape": {1, 2} - {2}})
    assert lines(log)[0]["shape"] == "{1}"


def test_level_is_respected_and_reconfiguring_replaces(log: io.StringIO) -> None:
    logging.getLogger("x").debug("hidden")
    configure_logging(role="decode", rank=1, level="debug", stream=log)
    logging.getLogger("x").debug("shown")
    assert [(r["msg"], r["rank"]) for r in lines(log)] == [("shown", 1)]


async def test_concurrent_tasks_log_their_own_request_id(log: io.StringIO) -> None:
    both_bound = asyncio.Barrier(2)

    async def work(request_id: str) -> None:
        bind_request_id(request_id)
        await both_bound.wait()
        logging.getLogger("x").info(f"by {request_id}")

    await asyncio.gather(work("r-1"), work("r-2"))
    logging.getLogger("x").info("by nobody")
    assert {(r["msg"], r["request_id"]) for r in lines(log)} == {
        ("by r-1", "r-1"),
        ("by r-2", "r-2"),
        ("by nobody", ""),
    }


def test_request_context_ends_with_its_block(log: io.StringIO) -> None:
    with request_context("r-1"):
        logging.getLogger("x").info("in")
    logging.getLogger("x").info("out")
    assert [r["request_id"] for r in lines(log)] == ["r-1", ""]
