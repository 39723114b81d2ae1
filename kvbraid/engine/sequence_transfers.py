"""The KV transfer of a sequence, opened and closed by operations in the step plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvbraid.engine.sequence import EngineRequest, Sequence, Source, Status
from kvbraid.engine.step_plan import (
    BeginSend,
    BindSend,
    CloseGrant,
    EndSend,
    OpenGrant,
    Operation,
)
from kvbraid.errors import InvalidRequestError
from kvbraid.transport.grants import Grant


class SequenceTransfers:
    """A sequence has at most one transfer, whose grant it carries while the transfer is open."""

    def __init__(
        self,
        issue_grant: Callable[[int, int], Grant],
        operate: Callable[[Operation], None],
    ) -> None:
        """issue_grant(first_position, end_position) makes the grant of an admitted handoff.
        operate: puts an operation into the next plan.
        """
        self._issue_grant = issue_grant
        self._operate = operate

    def begin(self, sequence: Sequence) -> None:
        """A queued prompt with a destination keeps the lease there, so that a long queue does not
        cost it."""
        destination = sequence.request.destination
        if destination is not None:
            sequence.grant = destination
            self._operate(BeginSend(destination.to_json()))

    def bind(self, sequence: Sequence) -> None:
        """An admitted sequence has its pages: rows arrive in them or leave from them."""
        if sequence.status is Status.RECEIVING:
            num_tokens = len(sequence.token_ids)
            grant = self._issue_grant(min(sequence.num_computed_tokens, num_tokens), num_tokens)
            self._operate(OpenGrant(sequence.slot, grant.to_json()))
            sequence.grant = grant
        elif sequence.grant is not None:
            self._operate(BindSend(sequence.slot, sequence.grant.transfer_id))

    def close(self, sequence: Sequence) -> None:
        """No row of the sequence moves any more."""
        if sequence.grant is not None:
            receiving = sequence.request.source is Source.HANDOFF
            end = CloseGrant if receiving else EndSend
            self._operate(end(sequence.grant.transfer_id))
            sequence.grant = None


def check_destination(request: EngineRequest, others: Iterable[Sequence]) -> None:
    """A transfer id belongs to one sequence: a sender refuses to begin it twice.

    Raises InvalidRequestError when one of `others` has it.
    """
    if request.destination is None:
        return
    transfer_id = request.destination.transfer_id
    for other in others:
        destination = other.request.destination
        if destination is not None and destination.transfer_id == transfer_id:
            raise InvalidRequestError(
                f"transfer {transfer_id.hex()} is in use by {other.request.key}", field="grant"
            )


def count_open(sequences: Iterable[Sequence]) -> dict[str, int]:
    """Handoffs under way by direction, "in" and "out"."""
    open_ones = [s for s in sequences if s.grant is not None]
    incoming = sum(s.request.source is Source.HANDOFF for s in open_ones)
    return {"in": incoming, "out": len(open_ones) - incoming}
