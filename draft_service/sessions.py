"""Decode workers that the service remembers: their sequences and their last answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import count

from draft_service.step_answer import StepAnswer
from kvbraid.errors import InvalidRequestError, LeaseLostError, OverloadedError

# A worker repeats at most the steps that were on their way when its stream broke.
_KEPT_ANSWERS = 8


class Session:
    """One incarnation of a decode worker; outlives its streams. For one thread at a time.

    number: unique in this process. owner: token of the stream that speaks for it now, None
    between streams.
    """

    def __init__(self, incarnation: int, number: int, max_keys: int) -> None:
        self.incarnation = incarnation
        self.number = number
        self.owner: object | None = None
        self._max_keys = max_keys
        self._keys: OrderedDict[str, None] = OrderedDict()
        self._answers: OrderedDict[int, StepAnswer] = OrderedDict()
        self._newest_step = 0

    def own_key(self, key: str) -> str:
        """The proposer's name of the worker's sequence `key`: workers share no names."""
        return f"{self.incarnation:x}/{key}"

    def require_owner(self, owner: object) -> None:
        """Raises LeaseLostError unless the stream `owner` speaks for the worker."""
        if self.owner is not owner:
            raise LeaseLostError("another stream speaks for this worker now")

    def answer_to(self, step_id: int) -> StepAnswer | None:
        """The answer, known or not, to a step that came before; None for a new step.

        Raises InvalidRequestError for an old step whose answer is not kept any more.
        """
        known = self._answers.get(step_id)
        if known is None and step_id <= self._newest_step:
            raise InvalidRequestError(
                f"step_id is {step_id}, accepted: above {self._newest_step}, or one of the last "
                f"{_KEPT_ANSWERS}",
                field="step_id",
            )
        return known

    def begin(self, step_id: int) -> StepAnswer:
        """A new step: what takes its answer."""
        self._newest_step = step_id
        answer = self._answers[step_id] = StepAnswer()
        while len(self._answers) > _KEPT_ANSWERS:
            self._answers.popitem(last=False)
        return answer

    def touch(self, keys: Iterable[str]) -> list[str]:
        """The proposer's names `keys` are in use; returns those least recently used that are too
        many and are forgotten here."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        return [self._keys.popitem(last=False)[0] for _ in range(len(self._keys) - self._max_keys)]

    def forget(self, keys: Iterable[str]) -> None:
        """Sequences have ended."""
        for key in keys:
            self._keys.pop(key, None)

    @property
    def keys(self) -> tuple[str, ...]:
        """The proposer's names of its sequences."""
        return tuple(self._keys)


class Sessions:
    """The last `max_sessions` decode workers, by incarnation. For one thread at a time.

    max_keys: sequences remembered of each. on_forget: called with a session that is forgotten.
    """

    def __init__(
        self, *, max_sessions: int, max_keys: int, on_forget: Callable[[Session], None]
    ) -> None:
        self._max_sessions = max_sessions
        self._max_keys = max_keys
        self._on_forget = on_forget
        self._sessions: OrderedDict[int, Session] = OrderedDict()
        self._numbers = count()

    def attach(self, incarnation: int, owner: object) -> Session:
        """The worker's session, spoken for by `owner` from now on.

        Raises OverloadedError when every place is taken by a worker with a stream.
        """
        session = self._sessions.get(incarnation)
        if session is None:
            self._make_room()
            session = Session(incarnation, next(self._numbers), self._max_keys)
            self._sessions[incarnation] = session
        self._sessions.move_to_end(incarnation)
        session.owner = owner
        return session

    def detach(self, session: Session, owner: object) -> bool:
        """The stream `owner` has ended; the session stays. Returns whether it has no stream now."""
        if session.owner is not owner:
            return False
        session.owner = None
        return True

    def forget(self, session: Session) -> None:
        """The worker has had no stream for long, and its sequences go."""
        del self._sessions[session.incarnation]
        self._on_forget(session)

    @property
    def num_attached(self) -> int:
        """Workers with a stream."""
        return sum(session.owner is not None for session in self._sessions.values())

    def _make_room(self) -> None:
        if len(self._sessions) < self._max_sessions:
            return
        idle = next((s for s in self._sessions.values() if s.owner is None), None)
        if idle is None:
            raise OverloadedError(f"{self._max_sessions} decode workers draft here already")
        self.forget(idle)
