"""Which target layers a drafter reads: the dialects' ids, normalised to "output of layer i".

Dialects count alike but from different places: SpecForge and DeepSpec name the layer whose output
is read, SafeAILab, vLLM, TorchSpec and speculators the layer that reads it, which is one more.
"""

from __future__ import annotations

from kvbraid.errors import CheckpointError
from kvbraid.model.raw_config import RawConfig

# The id that means "output of layer 0".
OUTPUT_OF_LAYER = 0
INPUT_OF_LAYER = 1


def default_tap_layers(origin: str, num_layers: int) -> tuple[int, ...]:
    """What every EAGLE3 dialect taps when its config names nothing: early, middle, late.

    {2, L//2, L-3} as inputs (SafeAILab, vLLM, SGLang, speculators) and {1, L//2-1, L-4} as outputs
    (SpecForge) are the same three tensors. Raises CheckpointError for a target too shallow.
    """
    taps = (1, num_layers // 2 - 1, num_layers - 4)
    if not 1 < taps[1] < taps[2]:
        raise CheckpointError(
            f"{origin}: names no tapped layers, and the default {taps} does not fit a target of "
            f"{num_layers} layers; accepted: eagle_config.eagle_aux_hidden_state_layer_ids"
        )
    return taps


def read_ids(raw: RawConfig, key: str) -> tuple[int, ...]:
    """The ids of `key`, which must be a non-empty list of integers."""
    ids = raw.value(key)
    if (
        not isinstance(ids, list)
        or not ids
        or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids)
    ):
        raise raw.error(key, ids, "a list of layer numbers")
    return tuple(ids)


def read_tap_layers(raw: RawConfig, key: str, num_layers: int, id_of_first: int) -> tuple[int, ...]:
    """The layers that `key` names, where the id `id_of_first` means "output of layer 0".

    Raises CheckpointError unless they rise within 0 .. num_layers - 2: the last layer's output is
    final-normed in some tools and not in others, so nobody can tell what was trained on.
    """
    ids = read_ids(raw, key)
    taps = tuple(one - id_of_first for one in ids)
    if list(taps) != sorted(set(taps)):
        raise raw.error(key, list(ids), "layers in rising order, none twice")
    if taps[-1] == num_layers - 1:
        raise raw.error(
            key, list(ids), f"layers before the last one (output of layer {num_layers - 1})"
        )
    if taps[0] < 0 or taps[-1] >= num_layers:
        first, last = id_of_first, num_layers - 2 + id_of_first
        raise raw.error(key, list(ids), f"{first} .. {last} for a target of {num_layers} layers")
    return taps
