"""The engine seam for equality checks: real rank processes, models loaded once, a fresh pool,
attention and engine for every case.

    with EngineWorld(model, tp_size=2, dcp_size=2) as world:
        outcome = world.run(Case(page_size=4), [[Prompt((1, 2, 3), max_tokens=8)]])

Phases run one after the other (the second meets the first's prefix cache); prompts of one phase
run together.
"""

from __future__ import annotations

import multiprocessing as mp
import secrets
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from kvbraid.engine.ranks import RankContext
from tools.engine_case import Case, Outcome, Prompt
from tools.engine_rank import Topology, run_rank


class EngineWorld:
    """Rank processes of one topology. A context manager."""

    def __init__(
        self,
        model: str,
        *,
        tp_size: int,
        dcp_size: int,
        communicator: str = "shared_memory",
        device: str = "cpu",
        dtype: str = "float32",
    ) -> None:
        """communicator "nccl" goes with device "cuda": rank r on GPU r."""
        self._world = Topology(model, dcp_size, communicator, device, dtype)
        self._tp_size = tp_size
        self._processes: list[Any] = []

    def __enter__(self) -> EngineWorld:
        spawn = mp.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        run_id = f"{mp.current_process().pid}-{secrets.token_hex(4)}"
        port = 20000 + secrets.randbelow(20000)
        for rank in range(self._tp_size):
            context = RankContext(
                rank, self._tp_size, rank, self._tp_size, run_id, "127.0.0.1", port
            )
            pipe = theirs if rank == 0 else None
            process = spawn.Process(target=run_rank, args=(context, self._world, pipe), daemon=True)
            process.start()
            self._processes.append(process)
        theirs.close()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._pipe.send(None)
        for process in self._processes:
            process.join(10 if error is None else 0)
            if process.is_alive():
                process.kill()

    def run(self, case: Case, phases: Sequence[Sequence[Prompt]]) -> Outcome:
        """Run the prompts of each phase together, phase after phase.

        Raises EOFError when rank 0 failed; its traceback is on stderr.
        """
        self._pipe.send((case, [list(phase) for phase in phases]))
        outcome = self._pipe.recv()
        assert isinstance(outcome, Outcome)
        return outcome
