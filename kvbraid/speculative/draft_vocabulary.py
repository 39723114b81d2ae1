"""The map from draft ids to target ids: d2t holds offsets, t2d says which target ids are drafted.

target id = j + d2t[j] for draft id j.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbraid.errors import CheckpointError
from kvbraid.model.tensor_source import TensorSource
from kvbraid.speculative.drafter_config import DrafterConfig

OFFSETS = "d2t"
MEMBERSHIP = "t2d"
FORMATS = {OFFSETS: ("I64", "I32"), MEMBERSHIP: ("BOOL",)}


def read_draft_offsets(
    source: TensorSource, config: DrafterConfig, *, ids_are_first: bool
) -> Tensor | None:
    """d2t, int64 [Vd]; None where draft ids are the target's.

    ids_are_first: the operator says that draft id j is target id j. Raises CheckpointError for a
    map that is missing, empty (all zero, as broken exports have it), leaves the vocabulary, names
    an id twice or contradicts t2d.
    """
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    offsets = _read(source, OFFSETS, size)
    has_map = offsets is not None and bool(offsets.any())
    if size == vocab_size:
        if has_map:
            raise _refused(source, "moves ids", f"none with a vocabulary of {size} on both sides")
        return None
    if ids_are_first:
        if has_map:
            raise _refused(source, "moves ids", 'none with "draft_vocabulary": "first_ids"')
        offsets = torch.zeros(size, dtype=torch.int64)
    elif offsets is None or not has_map:
        what = "is missing" if offsets is None else "is all zero, which a broken export leaves"
        raise _refused(
            source,
            what,
            f"the map of {size} draft ids into {vocab_size}, or in config.json "
            '"kvbraid": {"draft_vocabulary": "first_ids"} where draft id j is target id j',
        )
    offsets = offsets.to(torch.int64)
    ids = torch.arange(size) + offsets
    _check_ids(source, ids, vocab_size)
    _check_membership(source, ids, vocab_size, may_be_empty=ids_are_first)
    return offsets


def _check_ids(source: TensorSource, ids: Tensor, vocab_size: int) -> None:
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        draft_id = int(outside.nonzero()[0])
        raise _refused(
            source,
            f"sends draft id {draft_id} to {int(ids[draft_id])}",
            f"offsets (not target ids) that stay within 0 .. {vocab_size - 1}",
        )
    if len(set(ids.tolist())) != len(ids):
        raise _refused(source, "sends two draft ids to one target id", "distinct target ids")


def _check_membership(
    source: TensorSource, ids: Tensor, vocab_size: int, *, may_be_empty: bool
) -> None:
    membership = _read(source, MEMBERSHIP, vocab_size)
    if membership is None or (may_be_empty and not membership.any()):
        return
    if int(membership.sum()) != len(ids) or not bool(membership[ids].all()):
        raise _refused(
            source,
            f"names {len(ids)} target ids, t2d {int(membership.sum())} and not the same",
            "a d2t and a t2d of one export",
        )


def _read(source: TensorSource, name: str, size: int) -> Tensor | None:
    stored = source.tensors.get(name)
    if stored is None:
        return None
    if stored.shape != (size,) or stored.format not in FORMATS[name]:
        raise CheckpointError(
            f"{source.origin}: tensor {name} is {stored.format} {list(stored.shape)}; "
            f"accepted: {' or '.join(FORMATS[name])} [{size}]"
        )
    return source.read(name, (range(size),))


def _refused(source: TensorSource, what: str, accepted: str) -> CheckpointError:
    return CheckpointError(f"{source.origin}: tensor {OFFSETS} {what}; accepted: {accepted}")
