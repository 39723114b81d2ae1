"""How a drafter fits its target: widths, vocabularies, taps, and what it shares."""

from __future__ import annotations

from typing import TypedDict

from kvbraid.errors import CheckpointError
from kvbraid.model.raw_config import RawConfig
from kvbraid.speculative.drafter_file import DrafterFile


class FitFields(TypedDict):
    """The fields of DrafterConfig that tie it to its target."""

    target_hidden_size: int
    num_target_layers: int | None
    tap_layers: tuple[int, ...]
    vocab_size: int
    draft_vocab_size: int
    has_own_embedding: bool
    has_own_head: bool


def read_target_hidden_size(raw: RawConfig, file: DrafterFile) -> int:
    """The width of a tap. Raises CheckpointError unless it is the target's."""
    expected = file.target.hidden_size
    width = raw.integer("target_hidden_size", expected)
    if width != expected:
        raise raw.error("target_hidden_size", width, f"{expected}, the target's hidden size")
    return width


def read_target_depth(raw: RawConfig, file: DrafterFile, key: str) -> int | None:
    """The target's number of layers as `key` gives it. Raises CheckpointError unless it is so."""
    depth = raw.optional_integer(key)
    if depth is not None and depth != file.target.num_layers:
        raise raw.error(key, depth, f"{file.target.num_layers}, the target's layers")
    return depth


def read_vocabulary(raw: RawConfig, file: DrafterFile) -> int:
    """The target's vocabulary. Raises CheckpointError when the drafter was made for another."""
    size = raw.integer("vocab_size")
    if size != file.target.vocab_size:
        raise raw.error("vocab_size", size, f"{file.target.vocab_size}, the target's vocabulary")
    return size


def read_draft_vocabulary_size(raw: RawConfig, vocab_size: int, default: int | None) -> int:
    """Entries of the draft head. default None: the key must be there."""
    size = raw.integer("draft_vocab_size", default)
    if size > vocab_size:
        raise raw.error("draft_vocab_size", size, f"at most vocab_size = {vocab_size}")
    return size


def check_fusion(file: DrafterFile, hidden_size: int, taps: tuple[int, ...]) -> None:
    """Raises CheckpointError when fc does not take the taps that the config names."""
    stored = file.tensors.get("fc.weight")
    width = file.target.hidden_size
    if stored is None:
        raise CheckpointError(f"{file.origin}: tensor fc.weight is missing")
    if stored.shape != (hidden_size, len(taps) * width):
        raise CheckpointError(
            f"{file.origin}: fc.weight {list(stored.shape)} does not fit {len(taps)} taps "
            f"(outputs of layers {', '.join(map(str, taps))}) of width {width} and a drafter of "
            f"width {hidden_size}; accepted: [{hidden_size}, {len(taps) * width}]"
        )


def shares_with_target(file: DrafterFile, hidden_size: int) -> tuple[bool, bool]:
    """Whether the file has its own embedding, and its own head: what is there is kept.

    Raises CheckpointError when the target's would be used and has another width.
    """
    own = tuple(f"{name}.weight" in file.tensors for name in ("embed_tokens", "lm_head"))
    width = file.target.hidden_size
    for name, is_own in zip(("embed_tokens", "lm_head"), own, strict=True):
        if not is_own and hidden_size != width:
            raise CheckpointError(
                f"{file.origin}: tensor {name}.weight is missing and the target's, of width "
                f"{width}, does not fit a drafter of width {hidden_size}"
            )
    return own[0], own[1]
