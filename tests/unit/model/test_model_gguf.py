"""GGUF files written with the gguf package, against transformers with the decoded weights."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
import transformers

from kvbraid.errors import CheckpointError
from kvbraid.model.gguf_file import GgufFile
from kvbraid.model.gguf_source import GgufSource
from kvbraid.model.loader import load_config, load_model

HEADS, KV_HEADS, DIM, HIDDEN, INNER, LAYERS, VOCAB = 6, 2, 16, 96, 160, 2, 70
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
F16 = gguf.GGMLQuantizationType.F16


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    layer = re.match(r"model\.layers\.(\d+)\.(.*)", stem)
    return f"blk.{layer[1]}.{NAMES[layer[2]]}.{kind}" if layer else f"{NAMES[stem]}.{kind}"


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of a Llama model."""
    pairs = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def decode(raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Blocks of 32 numbers, decoded by hand: Q4_1 is d, m, 16 bytes; Q8_0 is d, 32 bytes."""
    blocks = raw.reshape(raw.shape[0], -1, 20 if kind == Q4_1 else 34)
    scale = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    if kind == Q8_0:
        return (blocks[..., 2:].view(np.int8) * scale).reshape(raw.shape[0], -1)
    minimum = blocks[..., 2:4].copy().view(np.float16).astype(np.float32)
    nibbles = np.concatenate((blocks[..., 4:] & 15, blocks[..., 4:] >> 4), -1)
    return (nibbles * scale + minimum).reshape(raw.shape[0], -1)


def kind_of(name: str) -> gguf.GGMLQuantizationType | None:
    if "norm" in name or name.endswith("bias"):
        return None
    if "embed" in name or "v_proj" in name:
        return Q8_0
    return F16 if "gate_proj" in name or "lm_head" in name else Q4_1


def write_model(
    model,
    path: Path,
    architecture: str,
    *,
    rope_factors: list[float] | None = None,
    metadata: dict | None = None,
    extra: dict | None = None,
) -> None:
    """Write `model` as a converter would, and give `model` the numbers that the file holds."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(VOCAB)
    writer.add_rope_dimension_count(DIM)
    writer.add_token_list([f"token {i}" for i in range(VOCAB)])
    for key, value in (metadata or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        _write_tensor(writer, name, tensor, architecture)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, arch: str) -> None:
    stored = tensor.numpy().astype(np.float32)
    num_heads = HEADS if "q_proj" in name else KV_HEADS
    is_permuted = arch == "llama" and re.search(r"[qk]_proj", name) is not None
    if is_permuted:
        stored = permute(stored, num_heads)
    kind = kind_of(name)
    if kind is None:
        writer.add_tensor(gguf_name(name), stored)
        return
    if kind == F16:
        stored = stored.astype(np.float16)
        writer.add_tensor(gguf_name(name), stored)
        tensor.copy_(torch.from_numpy(stored.astype(np.float32)))
        return
    raw = gguf.quants.quantize(stored, kind)
    writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
    decoded = torch.from_numpy(decode(raw, kind)).bfloat16().float()
    if is_permuted:
        pairs = decoded.view(num_heads, DIM // 2, 2, -1)
        decoded = torch.cat((pairs[:, :, 0], pairs[:, :, 1]), 1).reshape(decoded.shape)
    tensor.copy_(decoded)


def make_model(lab: SimpleNamespace, family: str, **settings):
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 256,
        **({"head_dim": DIM} if family == "Qwen3" else {}),
        **settings,
    }
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    lab.randomize(model, 11)
    return model


def assert_equal_to(model, path: Path, lab: SimpleNamespace, topology) -> None:
    token_ids = torch.randint(0, VOCAB, (30,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(token_ids[None], use_cache=False).logits[0]
    _, logits = lab.run_topology(path, [token_ids], topology)
    assert expected.std() > 0.3
    assert (logits - expected).abs().max() <= 2e-4


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("family", "architecture"), [("Llama", "llama"), ("Qwen2", "qwen2"), ("Qwen3", "qwen3")]
)
@pytest.mark.parametrize("topology", [(1, 1, "gather"), (4, 2, "replicate"), (3, 1, "gather")])
def test_quantised_gguf_equals_transformers_with_the_decoded_weights(
    family: str, architecture: str, tied: bool, topology, lab: SimpleNamespace, tmp_path: Path
) -> None:
    model = make_model(lab, family, tie_word_embeddings=tied)
    path = tmp_path / "model.gguf"
    write_model(model, path, architecture)
    assert_equal_to(model, path, lab, lab.Topology(*topology))


def test_a_folder_with_one_gguf_file_is_that_file(lab: SimpleNamespace, tmp_path: Path) -> None:
    write_model(make_model(lab, "Llama"), tmp_path / "any-name.gguf", "llama")
    assert load_config(tmp_path) == load_config(tmp_path / "any-name.gguf")
    (tmp_path / "other.gguf").write_bytes((tmp_path / "any-name.gguf").read_bytes())
    with pytest.raises(CheckpointError, match=r"any-name\.gguf, other\.gguf"):
        load_config(tmp_path)


def test_rope_factors_of_a_llama3_file_are_applied(lab: SimpleNamespace, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = make_model(lab, "Llama", rope_parameters=rope)
    factors = []
    for pair in range(DIM // 2):
        wavelength = 2 * math.pi * 500.0 ** (2 * pair / DIM)
        smooth = (64 / wavelength - 1) / 3
        if wavelength < 16:
            factors.append(1.0)
        elif wavelength > 64:
            factors.append(8.0)
        else:
            factors.append(1 / ((1 - smooth) / 8 + smooth))
    assert 1.0 in factors
    assert 8.0 in factors
    path = tmp_path / "model.gguf"
    write_model(model, path, "llama", rope_factors=factors)
    assert_equal_to(model, path, lab, lab.Topology())


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_of_the_metadata_is_applied(
    kind: str, lab: SimpleNamespace, tmp_path: Path
) -> None:
    rope = {"rope_type": kind, "rope_theta": 1000.0, "factor": 4.0}
    metadata: dict = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 256
    model = make_model(lab, "Llama", rope_parameters=rope)
    path = tmp_path / "model.gguf"
    write_model(model, path, "llama", metadata=metadata)
    assert_equal_to(model, path, lab, lab.Topology())


def test_float_tensors_keep_their_precision_and_quantised_ones_are_bf16(
    lab: SimpleNamespace, tmp_path: Path, solo
) -> None:
    """The oracle above decodes the same way; here the rule itself: rounding moves the logits."""
    model = make_model(lab, "Llama")
    path = tmp_path / "model.gguf"
    write_model(model, path, "llama")
    gate = model.state_dict()["model.layers.0.mlp.gate_proj.weight"]
    assert not torch.equal(gate, gate.bfloat16().float())
    assert_equal_to(model, path, lab, lab.Topology())
    gate.copy_(gate.bfloat16().float())
    with pytest.raises(AssertionError):
        assert_equal_to(model, path, lab, lab.Topology())


def test_a_rank_decodes_only_its_rows_and_the_blocks_around_its_columns(
    lab: SimpleNamespace, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_model(make_model(lab, "Llama"), path, "llama")
    token_ids = torch.arange(4)
    whole, shard = (_largest_reads(lab, path, token_ids, tp_size) for tp_size in (1, 4))
    assert whole.keys() == shard.keys()
    for name, num_bytes in whole.items():
        if "norm" in name:
            continue
        # The widest rank keeps 2 of 6 heads, 18 of 70 tokens, 40 of 160 inner numbers, 1 of 2 KV
        # heads. Blocks are 32 wide: its columns of o (32 of 96) and down (40 of 160) touch two.
        limit = 0.34
        if re.search("([kv]|o|down)_proj", name):
            limit = 64 / 96 if "o_proj" in name else 0.5
        assert shard[name] <= limit * num_bytes, name


def test_any_part_of_a_permuted_tensor_is_that_part_of_the_whole(gguf_path: Path) -> None:
    file = GgufFile(gguf_path)
    source = GgufSource(file, load_config(gguf_path))
    name = "model.layers.0.self_attn.q_proj.weight"
    rows, columns = source.tensors[name].shape
    whole = source.read(name, (range(rows), range(columns)))
    part = source.read(name, (range(5, 43), range(10, 70)))
    assert torch.equal(part, whole[5:43, 10:70])
    assert source.read(name, (range(4, 4), range(columns))).shape == (0, columns)


def _largest_reads(lab: SimpleNamespace, path: Path, token_ids, tp_size: int) -> dict[str, int]:
    sizes: dict[str, int] = {}

    def on_read(name: str, num_bytes: int) -> None:
        sizes[name] = max(sizes.get(name, 0), num_bytes)

    lab.run_topology(path, [token_ids], lab.Topology(tp_size), on_read=on_read)
    return sizes


@pytest.fixture
def gguf_path(lab: SimpleNamespace, tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    write_model(make_model(lab, "Llama"), path, "llama")
    return path


@pytest.mark.parametrize("share", [0.001, 0.02, 0.2, 0.999])
def test_a_truncated_file_is_refused_by_name(gguf_path: Path, share: float) -> None:
    whole = gguf_path.read_bytes()
    gguf_path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(CheckpointError, match=r"model\.gguf.*(truncated|damaged)"):
        load_config(gguf_path)


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        load_config(path)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "deepseek2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="'deepseek2' is not supported"):
        load_config(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.logit_scale", 0.5),
        ("llama.attention.scale", 0.1),
        ("llama.rope.scaling.type", "longrope"),
        ("llama.expert_count", 8.0),
        ("llama.attention.sliding_window", 512.0),
        ("llama.rope.scaling.attn_factor", 1.5),
    ],
)
def test_metadata_that_changes_the_numbers_is_refused_by_key_and_value(
    key: str, value: object, lab: SimpleNamespace, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_model(make_model(lab, "Llama"), path, "llama", metadata={key: value})
    short = key.removeprefix("llama.")
    with pytest.raises(CheckpointError, match=rf"{re.escape(short)} = {value!r}"):
        load_config(path)


def test_an_extra_tensor_is_refused_by_its_gguf_name(
    lab: SimpleNamespace, tmp_path: Path, solo
) -> None:
    path = tmp_path / "model.gguf"
    extra = {"blk.0.attn_sinks.weight": np.zeros(HEADS, np.float32)}
    write_model(make_model(lab, "Llama"), path, "llama", extra=extra)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_sinks\.weight does not belong"):
        load_model(path, parallel=solo(load_config(path)))
