"""The error of a worker whose ranks can no longer work in lockstep."""

from __future__ import annotations

from kvbraid.errors import UnavailableError


class RankLostError(UnavailableError):
    """A rank of this worker is dead, frozen or never came; the whole worker has to end."""
