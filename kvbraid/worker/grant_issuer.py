"""Makes the grants of one worker."""

from __future__ import annotations

from collections.abc import Sequence

from kvbraid.kv.kv_layout import KvLayout
from kvbraid.transport.grant import Grant, RankEndpoint, new_transfer_id


class GrantIssuer:
    """Each grant has an id of its own and a generation that no earlier one of this process had.

    The ranks' endpoints are known only after every rank listens: `publish` them before the first
    grant.
    """

    def __init__(self, *, layout: KvLayout, incarnation: int, lease_ms: int) -> None:
        self._layout = layout
        self._incarnation = incarnation
        self._lease_ms = lease_ms
        self._generation = 0
        self._endpoints: tuple[RankEndpoint, ...] = ()

    def publish(self, endpoints: Sequence[RankEndpoint]) -> None:
        """Where the ranks take rows, in rank order."""
        self._endpoints = tuple(endpoints)

    def issue(self, first_position: int, end_position: int) -> Grant:
        """Permission to write positions [first_position, end_position) of one sequence."""
        self._generation += 1
        return Grant(
            transfer_id=new_transfer_id(),
            incarnation=self._incarnation,
            generation=self._generation,
            first_position=first_position,
            end_position=end_position,
            layout=self._layout,
            endpoints=self._endpoints,
            lease_ms=self._lease_ms,
        )
