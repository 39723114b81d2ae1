"""A decode worker whose ranks go wrong when they are told to: `python -m failing_decode_worker`.

SIGUSR1: the next step with a decode raises. SIGUSR2: another token takes the place of the newest
one of a sequence, as on a rank whose memory or code has drifted.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

import decode_service.__main__ as decode_main
from decode_service.config import DecodeConfig
from kvbraid.engine.rank_executor import RankExecutor, StepOutput
from kvbraid.engine.step_plan import StepPlan
from kvbraid.rpc.lifecycle import run_service
from kvbraid.worker import rank_assembly
from kvbraid.worker.worker_process import run_worker

_asked: set[int] = set()


def _ask(number: int, frame: FrameType | None) -> None:
    _asked.add(number)


class FaultyExecutor(RankExecutor):
    """Does what the signals say, and is sound otherwise."""

    def execute(self, plan: StepPlan) -> StepOutput:
        if plan.decodes:
            if signal.SIGUSR1 in _asked:
                raise ArithmeticError("this rank was told to fail")
            if signal.SIGUSR2 in _asked:
                _asked.clear()
                self._state[plan.decodes[0].slot].token_ids[-1] ^= 1
        return super().execute(plan)


async def _serve(config: DecodeConfig) -> int:
    return await run_worker(config, "decode", "failing_decode_worker", decode_main._add_services)


def main() -> int:
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _ask)
    rank_assembly.RankExecutor = FaultyExecutor
    return run_service(DecodeConfig, "decode", _serve)


if __name__ == "__main__":
    sys.exit(main())
