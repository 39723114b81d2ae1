"""A digest that tells drafters apart: both ends of a drafting stream compare it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from kvbraid.speculative.drafter_source import OpenedDrafter

_NUM_SAMPLED = 16


def drafter_digest(opened: OpenedDrafter) -> str:
    """sha256 (hex) over the normalised config, every tensor's name, shape and storage format, and
    the first and last numbers of each tensor's last row. Cheap; two copies of a drafter agree,
    however their files are cut. Weights that differ only elsewhere are not told apart.
    """
    digest = hashlib.sha256(type(opened.config).__name__.encode())
    digest.update(json.dumps(asdict(opened.config), sort_keys=True).encode())
    source = opened.source
    for name in sorted(source.tensors):
        shape = source.tensors[name].shape
        digest.update(f"{name} {list(shape)} {source.tensors[name].format}\n".encode())
        for columns in _sampled_columns(shape[-1]):
            bounds = (*(range(size - 1, size) for size in shape[:-1]), columns)
            digest.update(source.read(name, bounds).double().numpy().tobytes())
    return digest.hexdigest()


def _sampled_columns(width: int) -> tuple[range, range]:
    num = min(width, _NUM_SAMPLED)
    return range(num), range(width - num, width)
