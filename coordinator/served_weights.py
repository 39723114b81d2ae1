"""Whose weights are served: those that most decode workers hold. The others get no work."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordinator.registry import Worker

logger = logging.getLogger(__name__)

_SHOWN = 12

Holders = Mapping[str, Sequence[str]]
"""Digest of weights -> addresses of the decode workers that serve and hold them."""


class ServedWeights:
    """Compares the weights of all workers, which must be the same, whenever one has changed."""

    def __init__(self) -> None:
        self.digest: str | None = None
        """None before any are served, and while as many workers hold these as hold those."""

    def compare(self, decode: Sequence[Worker], prefill: Sequence[Worker]) -> None:
        """Marks the workers whose weights are served, and says once of each other one why it is
        not used. At the start nothing is served before every decode worker had its say: which of
        them answers first is chance."""
        held = holders(decode)
        is_open = self.digest is None and not all(worker.is_heard for worker in decode)
        for worker in decode:
            worker.is_held_back = is_open
        if not held or is_open:
            return
        self.digest = served_digest(held, self.digest)
        for worker in (*decode, *prefill):
            if worker.is_serving and worker.is_answering and worker.info is not None:
                self._judge(worker, worker.info.model_digest, held)

    def _judge(self, worker: Worker, digest: str, held: Holders) -> None:
        fits = digest == self.digest
        if worker.is_compatible and not fits:
            logger.error(
                "worker %s holds weights %s and gets no work: decode workers hold %s; served: %s",
                worker.address,
                _shortened(digest),
                described(held),
                "none of them" if self.digest is None else _shortened(self.digest),
            )
        worker.is_compatible = fits


def holders(decode: Sequence[Worker]) -> Holders:
    """The weights of the decode workers that serve."""
    held: dict[str, list[str]] = {}
    for worker in decode:
        if worker.is_serving and worker.is_answering and worker.info is not None:
            held.setdefault(worker.info.model_digest, []).append(worker.address)
    return held


def served_digest(held: Holders, before: str | None) -> str | None:
    """The digest that most workers hold. Where as many hold another one it is the one served
    `before`, or none: which of them is wrong is then not for a coordinator to guess."""
    most = max(map(len, held.values()), default=0)
    leading = [digest for digest, workers in held.items() if len(workers) == most]
    if before in leading:
        return before
    return leading[0] if len(leading) == 1 else None


def described(held: Holders) -> str:
    """Every digest, shortened, with its workers; in one order on every coordinator."""
    return "; ".join(
        f"{_shortened(digest)} on {', '.join(sorted(workers))}"
        for digest, workers in sorted(held.items())
    )


def _shortened(digest: str) -> str:
    return digest[:_SHOWN] or "without a digest"
