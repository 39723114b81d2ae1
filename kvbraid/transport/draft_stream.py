"""A decode worker's stream to a draft service: what every way of carrying it does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count
from typing import Protocol

from kvbraid.errors import DataLossError
from kvbraid.speculative.proposal import DraftTask
from kvbraid.transport.draft_answers import AnsweredStep, answers_from_proto
from kvbraid.transport.draft_terms import DraftTerms
from kvbraid.v1 import draft_pb2 as pb

# The service knows this process by its incarnation and remembers its steps when a stream breaks:
# a new stream must not begin at 1 again.
_STEP_IDS = count(1)


class SentStep(ABC):
    """A step on its way. answered: once `is_done`, what came, or None when the stream has ended."""

    def __init__(self, num_tasks: int) -> None:
        self.num_tasks = num_tasks
        self.answered: AnsweredStep | None = None
        self.is_done = False

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Whether it was answered, or its stream has ended, within `seconds`; 0 only looks."""

    def resolve(self, answered: AnsweredStep | None) -> None:
        """The answer, or None for none. Once."""
        self.answered = answered
        self.is_done = True


class DraftStream(Protocol):
    """An open stream. Its service answers steps in the order in which they were begun."""

    @property
    def terms(self) -> DraftTerms:
        """What the service has."""
        ...

    @property
    def wire(self) -> str:
        """Name of the way, for logs."""
        ...

    def begin_step(self, tasks: Sequence[DraftTask], dropped: Sequence[str]) -> SentStep:
        """Send a step of `tasks`, which are within `terms`. From any thread; one step with tasks
        at a time. Never fails: a stream that has ended resolves it with None."""
        ...

    def open_grant(self, key: str, transfer_id: bytes, end_position: int) -> None:
        """Announce a prefill worker's rows. From any thread."""
        ...

    async def run(self) -> None:
        """Returns when the service says goodbye; raises the KVBraidError that ends the stream.
        Once, in the loop that opened it."""
        ...

    def close(self) -> None:
        """End the stream; every step without an answer is told. In the loop; may be repeated."""
        ...


class UnansweredSteps:
    """Steps of one stream by id. Ids grow in the order of sending: that is the caller's to keep."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._steps: dict[int, SentStep] = {}

    def add(self, step: SentStep) -> int:
        """The id of `step`, which is sent now."""
        step_id = next(_STEP_IDS)
        self._steps[step_id] = step
        return step_id

    def take(self, answers: pb.DraftAnswers) -> None:
        """Resolve the step that `answers` are for. Raises DataLossError when there is none or they
        do not fit it."""
        step = self._steps.pop(answers.step_id, None)
        if step is None:
            raise DataLossError(
                f"{self._address} answered step {answers.step_id}, which is not due"
            )
        answered = None
        try:
            answered = answers_from_proto(answers, step.num_tasks)
        finally:
            step.resolve(answered)

    def end(self) -> None:
        """No answer will come any more. More than one thread may find that out at a time."""
        for step_id in list(self._steps):
            step = self._steps.pop(step_id, None)
            if step is not None:
                step.resolve(None)


def open_request(key: str, transfer_id: bytes, end_position: int) -> pb.DraftRequest:
    """The message of `DraftStream.open_grant`."""
    opened = pb.DraftOpen(key=key, transfer_id=transfer_id, end_position=end_position)
    return pb.DraftRequest(open=opened)
