from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvbraid.errors import KVBraidError, UnavailableError
from kvbraid.worker.engine_watch import EngineWatch

TIMEOUT_S = 0.2


class Engine:
    """What a watch sees of an engine and of its server; `said` has every change of health."""

    def __init__(self) -> None:
        self.step_age_s = 0.0
        self.said: list[tuple[str, bool]] = []
        self.given_up: list[KVBraidError] = []
        self.looked = asyncio.Event()

    def age(self) -> float:
        self.looked.set()
        return self.step_age_s

    async def set_serving(self, is_serving: bool) -> None:
        self.said.append(("serving", is_serving))

    async def set_live(self, is_live: bool) -> None:
        self.said.append(("live", is_live))

    async def looks(self, count: int) -> None:
        """Returns when the watch has looked so often and acted on all but the last look."""
        for _ in range(count + 1):
            self.looked.clear()
            async with asyncio.timeout(10):
                await self.looked.wait()


@pytest.fixture
async def engine() -> Any:
    engine = Engine()
    watch = EngineWatch(
        engine,  # type: ignore[arg-type]
        step_age_s=engine.age,
        give_up=engine.given_up.append,
        stack=lambda: "deep inside",
        timeout_s=TIMEOUT_S,
    )
    task = asyncio.create_task(watch.run())
    yield engine
    task.cancel()


async def test_steps_within_the_timeout_change_nothing(engine: Engine) -> None:
    for age_s in (0.0, 0.5 * TIMEOUT_S, TIMEOUT_S):
        engine.step_age_s = age_s
        await engine.looks(2)
    assert (engine.said, engine.given_up) == ([], [])


async def test_a_stuck_engine_is_told_once_and_its_requests_are_given_up_again_and_again(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.step_age_s = 7.0
    await engine.looks(3)
    assert engine.said == [("serving", False), ("live", False)]
    assert len(engine.given_up) >= 3
    assert {type(error) for error in engine.given_up} == {UnavailableError}
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert "7.0 s in one step, accepted: at most 0.2" in record.getMessage()
    assert record.stack == "deep inside"


async def test_an_engine_that_gets_on_is_as_before(engine: Engine) -> None:
    engine.step_age_s = 7.0
    await engine.looks(1)
    engine.step_age_s = 0.0
    await engine.looks(1)
    num_given_up = len(engine.given_up)
    await engine.looks(2)
    assert engine.said[2:] == [("serving", True), ("live", True)]
    assert len(engine.given_up) == num_given_up
