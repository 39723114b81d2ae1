"""How rank 0 learns where every rank takes KV rows."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch

from attention.interface import Group
from kvbraid.transport.grant import RankEndpoint

# Room for a JSON endpoint: two host names of 255 characters and some numbers.
_RECORD_BYTES = 1024


def gather_endpoints(own: RankEndpoint, group: Group) -> list[RankEndpoint]:
    """Endpoints of all ranks, in rank order. A collective: blocks until every rank calls it."""
    return [RankEndpoint(**json.loads(text)) for text in _gather(json.dumps(asdict(own)), group)]


def gather_addresses(own: str, group: Group) -> dict[int, str]:
    """host:port that every rank gives, by rank. A collective: blocks until every rank calls it."""
    return dict(enumerate(_gather(own, group)))


def _gather(own: str, group: Group) -> list[str]:
    text = own.encode()
    if len(text) > _RECORD_BYTES:
        raise ValueError(f"record of {len(text)} bytes exceeds {_RECORD_BYTES}: {own}")
    record = torch.zeros(_RECORD_BYTES, dtype=torch.uint8)
    record[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = group.all_gather(record).numpy()
    return [row.tobytes().rstrip(b"\0").decode() for row in rows]
