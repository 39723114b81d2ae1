"""Tensors of a GGUF file under Hugging Face names; only the blocks needed are dequantised."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from kvbraid.errors import CheckpointError
from kvbraid.model.config import ModelConfig
from kvbraid.model.gguf_file import GgufFile, GgufTensor
from kvbraid.model.tensor_source import ReadListener, StoredTensor

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_GLOBAL = re.compile(r"([a-z_]+)\.(weight|bias)")
_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


class GgufSource:
    """Reads parts of GGUF tensors.

    Float tensors keep their precision. Quantised ones are dequantised and rounded to bf16, the
    precision they were quantised from, so that every rank and every run computes from the same
    weights. The rotary row permutation that llama GGUF files carry is undone.
    """

    def __init__(
        self, file: GgufFile, config: ModelConfig, on_read: ReadListener | None = None
    ) -> None:
        self.origin = str(file.path)
        self._file = file
        self._on_read = on_read
        self._head_dim = config.head_dim
        self._is_permuted = config.family == "llama"
        self._by_name = {_hugging_face_name(name): t for name, t in file.tensors.items()}
        self._tensors = {
            name: StoredTensor(t.shape, t.kind.name) for name, t in self._by_name.items()
        }

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor; a name that has no Hugging Face counterpart stays as it is."""
        return self._tensors

    def read(self, name: str, bounds: tuple[range, ...]) -> Tensor:
        """As TensorSource.read. Raises CheckpointError for a type that cannot be dequantised."""
        tensor = self._by_name[name]
        if not all(bounds):
            return torch.empty([len(bound) for bound in bounds], dtype=torch.bfloat16)
        if self._is_permuted and re.search(r"self_attn\.[qk]_proj\.", name):
            return self._read_permuted(name, tensor, bounds)
        return self._read_rows(name, tensor, bounds)

    def _read_permuted(self, name: str, tensor: GgufTensor, bounds: tuple[range, ...]) -> Tensor:
        """GGUF keeps a head's rows as rotary pairs (0, D/2), (1, D/2 + 1), ...; put them back."""
        dim = self._head_dim
        rows = bounds[0]
        heads = range(rows.start // dim * dim, -(-rows.stop // dim) * dim)
        stored = self._read_rows(name, tensor, (heads, *bounds[1:]))
        paired = stored.view(len(heads) // dim, dim // 2, 2, *stored.shape[1:])
        ordered = paired.transpose(1, 2).reshape(stored.shape)
        first = rows.start - heads.start
        return ordered[first : first + len(rows)]

    def _read_rows(self, name: str, tensor: GgufTensor, bounds: tuple[range, ...]) -> Tensor:
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        columns = bounds[-1]
        blocks = range(columns.start // block, -(-columns.stop // block))
        stored = np.frombuffer(
            self._file.data, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset
        ).reshape(*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)
        where = [slice(bound.start, bound.stop) for bound in bounds[:-1]]
        where.append(slice(blocks.start * block_bytes, blocks.stop * block_bytes))
        part = _decode(np.ascontiguousarray(stored[tuple(where)]), tensor, self.origin)
        if self._on_read is not None:
            self._on_read(name, part.nbytes)
        first = columns.start - blocks.start * block
        if len(columns) == part.shape[-1]:
            return part
        return part[..., first : first + len(columns)].contiguous()


def _decode(raw: np.ndarray, tensor: GgufTensor, origin: str) -> Tensor:
    """raw uint8 [..., bytes of a row] -> [..., numbers of a row]."""
    dtype = _FLOATS.get(tensor.kind)
    if dtype is not None:
        return torch.from_numpy(raw.copy()).view(dtype)
    try:
        values = dequantize(raw, tensor.kind)
    except NotImplementedError as error:
        raise CheckpointError(
            f"{origin}: tensor {tensor.name} of type {tensor.kind.name} cannot be dequantised"
        ) from error
    return torch.from_numpy(values).to(torch.bfloat16)


def _hugging_face_name(name: str) -> str:
    layer = _LAYER.fullmatch(name)
    if layer is not None and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    overall = _GLOBAL.fullmatch(name)
    if overall is not None and overall[1] in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[overall[1]]}.{overall[2]}"
    return name
