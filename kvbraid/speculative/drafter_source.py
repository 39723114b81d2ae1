"""Opens a drafter's folder: the dialect is recognised, read and normalised, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kvbraid.errors import CheckpointError
from kvbraid.model.config import ModelConfig
from kvbraid.model.safetensors_source import DTYPES, SafetensorsSource
from kvbraid.model.tensor_source import TensorSource
from kvbraid.model.weight_reader import WeightReader
from kvbraid.speculative.draft_vocabulary import FORMATS, OFFSETS, read_draft_offsets
from kvbraid.speculative.drafter_config import AnyDrafterConfig
from kvbraid.speculative.drafter_file import (
    DrafterFile,
    read_config_json,
    read_declarations,
)
from kvbraid.speculative.drafter_tensors import canonical_name, expected_tensors, known_extras
from kvbraid.speculative.dspark_dialects import (
    read_deepspec_dspark,
    read_k3_dspark,
    read_specforge_dspark,
    read_speculators_dspark,
)
from kvbraid.speculative.eagle3_dialects import (
    read_deepspec_eagle3,
    read_llama_eagle3,
    read_mla_eagle3,
    read_speculators_eagle3,
)
from kvbraid.speculative.renamed_source import RenamedSource

Reader = Callable[[DrafterFile], AnyDrafterConfig]

# Stored formats of the maps between vocabularies; weights are never integers.
INDEX_DTYPES = {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}

SPECULATORS_TYPES: dict[str, Reader] = {
    "eagle3": read_speculators_eagle3,
    "dspark": read_speculators_dspark,
}
ARCHITECTURES: dict[str, Reader] = {
    "LlamaForCausalLMEagle3": read_llama_eagle3,
    "Eagle3LlamaForCausalLM": read_llama_eagle3,
    # SafeAILab's first files say this; a plain Llama lacks fc.weight and is refused by it.
    "LlamaForCausalLM": read_llama_eagle3,
    "Eagle3DeepseekV2ForCausalLM": read_mla_eagle3,
    "Eagle3DeepseekV3ForCausalLM": read_mla_eagle3,
    "Qwen3Eagle3Model": read_deepspec_eagle3,
    "Qwen3DSparkModel": read_deepspec_dspark,
    "DSparkDraftModel": read_specforge_dspark,
    "K3DSparkModel": read_k3_dspark,
}


@dataclass(frozen=True, slots=True)
class OpenedDrafter:
    """A drafter ready to load. source: by the canonical names of `drafter_tensors`, checked
    against config; with `d2t` (int64 offsets) exactly where the draft vocabulary is smaller."""

    config: AnyDrafterConfig
    source: TensorSource


def open_drafter(path: str | Path, target: ModelConfig) -> OpenedDrafter:
    """The drafter in the folder `path` for `target`. Reads the maps of vocabularies, no weights.

    Raises CheckpointError naming the file and the key or tensor for what is unknown, ambiguous,
    missing, misshapen, left over, or made for another target.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: a drafter is a folder of config.json and safetensors")
    values = read_config_json(folder)
    origin = str(folder / "config.json")
    stored = SafetensorsSource(folder, dtypes=DTYPES | INDEX_DTYPES)
    source = RenamedSource(stored, canonical_name)
    _refuse_integer_weights(source)
    declared = read_declarations(values, origin)
    file = DrafterFile(values, origin, source.tensors, target, declared)
    config = _choose_reader(file)(file)
    offsets = read_draft_offsets(source, config, ids_are_first=declared.draft_ids_are_first)
    added = {} if offsets is None else {OFFSETS: offsets}
    normalised = RenamedSource(stored, canonical_name, hidden=frozenset({OFFSETS}), added=added)
    _check_tensors(config, normalised)
    return OpenedDrafter(config, normalised)


def _choose_reader(file: DrafterFile) -> Reader:
    raw = file.top_level()
    library = raw.value("speculators_model_type")
    if library is not None:
        if not isinstance(library, str) or library not in SPECULATORS_TYPES:
            raise raw.error("speculators_model_type", library, ", ".join(SPECULATORS_TYPES))
        return SPECULATORS_TYPES[library]
    architectures = raw.value("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise raw.error("architectures", architectures, "a list of one architecture")
    if architectures[0] not in ARCHITECTURES:
        raise raw.error("architectures", architectures[0], ", ".join(ARCHITECTURES))
    return ARCHITECTURES[architectures[0]]


def _refuse_integer_weights(source: TensorSource) -> None:
    for name, stored in source.tensors.items():
        if stored.format not in DTYPES and name not in FORMATS:
            raise CheckpointError(
                f"{source.origin}: tensor {name} is {stored.format}; accepted: {', '.join(DTYPES)}"
            )


def _check_tensors(config: AnyDrafterConfig, source: TensorSource) -> None:
    """Every tensor is expected with its shape, or a known extra."""
    reader = WeightReader(source, dtype=torch.float32, device=torch.device("cpu"))
    for name, shape in expected_tensors(config).items():
        reader.expect(name, shape)
    reader.finish(known_extras(config))
