"""Loads one rank's part of a model from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from kvbraid.errors import CheckpointError, ConfigError
from kvbraid.model.causal_lm import CausalLM, DecoderLayer
from kvbraid.model.config import DEEPSEEK_FAMILIES, ModelConfig
from kvbraid.model.deepseek import DeepseekLayer
from kvbraid.model.gguf_config import read_gguf_config
from kvbraid.model.gguf_file import GgufFile
from kvbraid.model.gguf_source import GgufSource
from kvbraid.model.hf_config import read_hf_config
from kvbraid.model.layers import VocabularyShard, load_norm
from kvbraid.model.llama import LlamaLayer
from kvbraid.model.parallel import ParallelContext
from kvbraid.model.rope import Rotary
from kvbraid.model.safetensors_source import SafetensorsSource
from kvbraid.model.tensor_source import ReadListener, TensorSource
from kvbraid.model.weight_reader import WeightReader

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16)


def load_config(path: str | Path) -> ModelConfig:
    """The model of a folder (config.json or one .gguf) or of a .gguf file. Reads no weights.

    Raises CheckpointError naming the file and what it does not understand.
    """
    return _open_config(Path(path))[0]


def open_checkpoint(path: str | Path) -> tuple[ModelConfig, TensorSource]:
    """The model of a folder or .gguf file and its tensors, for whoever needs a few of them.

    Raises CheckpointError as `load_config`, and for damaged weights.
    """
    config, open_source = _open_config(Path(path))
    return config, open_source()


def load_model(
    path: str | Path,
    *,
    parallel: ParallelContext,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    on_read: ReadListener | None = None,
) -> CausalLM:
    """This rank's part of the model at `path`, in `dtype` on `device`.

    on_read(name, num_bytes) hears of every piece materialised from the checkpoint. No other
    rank's shard of a large tensor is. Raises CheckpointError for a checkpoint that is damaged,
    incomplete, has tensors or settings that are not known, and ConfigError for a dtype or head
    layout that does not fit it.
    """
    if dtype not in SUPPORTED_DTYPES:
        accepted = ", ".join(str(accepted) for accepted in SUPPORTED_DTYPES)
        raise ConfigError(f"model dtype {dtype} is not supported; accepted: {accepted}")
    config, open_source = _open_config(Path(path), on_read)
    _check_heads(config, parallel)
    reader = WeightReader(open_source(), dtype=dtype, device=torch.device(device))
    model = _build(config, reader, parallel)
    reader.finish(_known_extras(config))
    return model


def model_digest(path: str | Path) -> str:
    """A hex digest that tells models apart without reading them whole.

    sha256 over the parsed config, every tensor's name, shape and storage format, and the first
    and last 16 numbers of each tensor. Cheap (milliseconds to seconds), stable across processes,
    machines and re-sharding of the files; weights that differ only elsewhere are not told apart.
    """
    config, open_source = _open_config(Path(path))
    source = open_source()
    digest = hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode())
    for name in sorted(source.tensors):
        stored = source.tensors[name]
        digest.update(f"{name} {list(stored.shape)} {stored.format}\n".encode())
        for bounds in _sampled_bounds(stored.shape):
            digest.update(source.read(name, bounds).float().numpy().tobytes())
    return digest.hexdigest()


def _sampled_bounds(shape: tuple[int, ...]) -> tuple[tuple[range, ...], ...]:
    width = min(shape[-1], 16) if shape else 0
    first = (*(range(min(size, 1)) for size in shape[:-1]), range(width))
    last = (
        *(range(max(size - 1, 0), size) for size in shape[:-1]),
        range(shape[-1] - width, shape[-1]),
    )
    return first, last


def _open_config(
    path: Path, on_read: ReadListener | None = None
) -> tuple[ModelConfig, Callable[[], TensorSource]]:
    if path.is_dir() and (path / "config.json").is_file():
        return read_hf_config(path), lambda: SafetensorsSource(path, on_read)
    file = GgufFile(_gguf_path(path))
    config = read_gguf_config(file)
    return config, lambda: GgufSource(file, config, on_read)


def _gguf_path(path: Path) -> Path:
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path}: a model is a folder or a .gguf file")
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder or file")
    found = sorted(path.glob("*.gguf"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise CheckpointError(
            f"{path}: holds no config.json and not exactly one .gguf file (found: {names})"
        )
    return found[0]


def _check_heads(config: ModelConfig, parallel: ParallelContext) -> None:
    heads = parallel.heads
    if heads.num_q_heads != config.num_q_heads or (
        config.mla is None and heads.num_kv_heads != config.num_kv_heads
    ):
        raise ConfigError(
            f"head layout of {heads.num_q_heads} query and {heads.num_kv_heads} KV heads does not "
            f"fit the model's {config.num_q_heads} and {config.num_kv_heads}"
        )


def _build(config: ModelConfig, reader: WeightReader, parallel: ParallelContext) -> CausalLM:
    layer_class: Callable[..., DecoderLayer] = (
        DeepseekLayer if config.family in DEEPSEEK_FAMILIES else LlamaLayer
    )
    rope_dim = config.head_dim if config.mla is None else config.mla.qk_rope_head_dim
    return CausalLM(
        config,
        vocabulary=_load_vocabulary(config, reader, parallel),
        layers=[layer_class(reader, config, parallel, i) for i in range(config.num_layers)],
        norm=load_norm(reader, "model.norm", config.hidden_size, config.rms_norm_eps),
        rotary=Rotary(config.rope, rope_dim, reader.device),
    )


def _load_vocabulary(
    config: ModelConfig, reader: WeightReader, parallel: ParallelContext
) -> VocabularyShard:
    shard = parallel.shard(config.vocab_size)
    shape = (config.vocab_size, config.hidden_size)
    embedding = reader.take("model.embed_tokens.weight", shape, rows=shard)
    head = embedding
    if not config.tie_word_embeddings:
        head = reader.take("lm_head.weight", shape, rows=shard)
    return VocabularyShard(embedding, head, shard, parallel)


def _known_extras(config: ModelConfig) -> dict[str, re.Pattern[str]]:
    """Why a tensor that the model does not use may be in its checkpoint -> names."""
    extras = {
        "rotary frequencies, computed from the config": re.compile(
            r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
            r"|rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight"
        )
    }
    if config.tie_word_embeddings:
        extras["a copy of the tied embedding"] = re.compile(r"lm_head\.weight")
    last = config.num_layers + config.num_mtp_layers
    if config.num_mtp_layers:
        numbers = "|".join(str(number) for number in range(config.num_layers, last))
        extras["multi-token-prediction layers"] = re.compile(rf"model\.layers\.({numbers})\..+")
    return extras
