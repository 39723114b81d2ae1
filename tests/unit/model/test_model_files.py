"""Safetensors folders: shards, damage, missing and extra tensors, and what a rank reads."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from attention.layout import HeadLayout
from kvbraid.errors import CheckpointError, ConfigError
from kvbraid.model.loader import load_config, load_model, model_digest
from kvbraid.model.parallel import ParallelContext

SETTINGS = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SETTINGS))
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def load(solo) -> Callable[[Path], object]:
    return lambda path: load_model(path, parallel=solo(load_config(path)))


def edit(folder: Path, change: Callable[[dict], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path) -> dict:
    """Split the single file in two with an index; returns the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def test_a_sharded_folder_is_the_same_model(folder: Path, saved: Path, lab) -> None:
    shard(folder)
    ids = torch.arange(20)
    _, expected = lab.run_topology(saved, [ids], lab.Topology())
    _, logits = lab.run_topology(folder, [ids], lab.Topology(2))
    assert (logits - expected).abs().max() < 1e-5
    assert model_digest(folder) == model_digest(saved)


def test_a_missing_tensor_is_refused_by_name(folder: Path, load) -> None:
    edit(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight .*missing"):
        load(folder)


def test_an_unknown_tensor_is_refused_by_name(folder: Path, load) -> None:
    edit(folder, lambda tensors: tensors.update({"model.layers.0.gate": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.gate does not belong"):
        load(folder)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
def test_a_wrong_shape_is_refused_with_both_shapes(folder: Path, load, name: str) -> None:
    def cut(tensors: dict) -> None:
        tensors[name] = tensors[name][:-1].clone()

    edit(folder, cut)
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[47.*asks for \[48"):
        load(folder)


def test_an_integer_tensor_is_refused_by_name(folder: Path, load) -> None:
    def quantise(tensors: dict) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.int8)

    edit(folder, quantise)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is I8; accepted: F32, F16, BF16"):
        load(folder)


@pytest.mark.parametrize("keep", [4, 200, -8])
def test_a_truncated_file_is_refused_by_name(folder: Path, load, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or damaged"):
        load(folder)


def test_a_missing_shard_is_refused_by_file_name(folder: Path, load) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: missing"):
        load(folder)


def test_an_index_that_its_shards_contradict_is_refused(folder: Path, load) -> None:
    index = shard(folder)
    first = "model-00001-of-00002.safetensors"
    name = next(name for name, file in index["weight_map"].items() if file != first)
    index["weight_map"][name] = first
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{first}: lacks {name}"):
        load(folder)


def test_an_index_that_points_outside_the_folder_is_refused(folder: Path, load) -> None:
    index = shard(folder)
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"'\.\./elsewhere\.safetensors', outside"):
        load(folder)


def test_pickle_weights_are_never_loaded(folder: Path, load) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin are never loaded"):
        load(folder)


def test_known_extra_tensors_are_skipped_and_logged(
    folder: Path, load, caplog: pytest.LogCaptureFixture
) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda tensors: tensors.update({name: torch.ones(6)}))
    with caplog.at_level(logging.INFO, "kvbraid.model"):
        load(folder)
    assert "skipped 1 tensors: rotary frequencies" in caplog.text


def test_prediction_layers_are_skipped_only_as_far_as_the_config_counts_them(
    tmp_path: Path, load, caplog: pytest.LogCaptureFixture, lab
) -> None:
    folder = Path(shutil.copytree(lab.ASSETS / "tiny-mla", tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    extra = {"model.layers.6.eh_proj.weight": torch.zeros(2, 2)}
    edit(folder, lambda tensors: tensors.update(extra))
    with pytest.raises(CheckpointError, match=r"model\.layers\.6\.eh_proj\.weight does not belong"):
        load(folder)
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.INFO, "kvbraid.model"):
        load(folder)
    assert "skipped 1 tensors: multi-token-prediction layers" in caplog.text


def test_a_rank_reads_only_its_shard(saved: Path, lab: SimpleNamespace) -> None:
    whole, quarter = (_bytes_read(lab, saved, tp_size) for tp_size in (1, 4))
    for name, num_bytes in whole.items():
        if "norm" not in name:
            assert quarter[name] == num_bytes, name
            continue
        assert quarter[name] == 4 * num_bytes, name


def test_a_rank_reads_only_its_experts(lab: SimpleNamespace) -> None:
    path = lab.ASSETS / "tiny-mla"
    whole, shared = (_bytes_read(lab, path, tp_size) for tp_size in (1, 4))
    for name in whole:
        if "experts." in name or "kv_b" in name or "q_b" in name or "lm_head" in name:
            assert shared[name] == whole[name], name


def _bytes_read(lab: SimpleNamespace, path: Path, tp_size: int) -> dict[str, int]:
    """Bytes of each tensor that all the ranks together materialised."""
    sizes: dict[str, int] = {}

    def on_read(name: str, num_bytes: int) -> None:
        sizes[name] = sizes.get(name, 0) + num_bytes

    topology = lab.Topology(tp_size)
    lab.run_topology(path, [torch.arange(3)], topology, on_read=on_read)
    return sizes


def test_tied_embeddings_are_one_tensor(lab: SimpleNamespace, tmp_path: Path, solo) -> None:
    config = transformers.LlamaConfig(**SETTINGS, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    read: list[str] = []
    parallel = solo(load_config(tmp_path))
    load_model(tmp_path, parallel=parallel, on_read=lambda name, _: read.append(name))
    assert read.count("model.embed_tokens.weight") == 1
    assert "lm_head.weight" not in read


def test_digest_tells_weights_and_settings_apart(folder: Path, saved: Path) -> None:
    assert model_digest(folder) == model_digest(saved)

    def nudge(tensors: dict) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][-1, -1] += 0.01

    edit(folder, nudge)
    nudged = model_digest(folder)
    assert nudged != model_digest(saved)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    assert model_digest(folder) not in (nudged, model_digest(saved))


def test_a_dtype_or_head_layout_that_does_not_fit_is_refused(saved: Path, solo, lab) -> None:
    parallel = solo(load_config(saved))
    with pytest.raises(ConfigError, match=r"torch\.float16 is not supported"):
        load_model(saved, parallel=parallel, dtype=torch.float16)
    wrong = ParallelContext(HeadLayout(8, 4, 1, 0, 1), parallel.tp_group)
    with pytest.raises(ConfigError, match="8 query and 4 KV heads does not fit the model's 4 and"):
        load_model(saved, parallel=wrong)
    with pytest.raises(ConfigError, match="q_mode 'spread' must be one of gather, replicate"):
        ParallelContext(HeadLayout(4, 4, 1, 0, 1), parallel.tp_group, "spread")
    with pytest.raises(ConfigError, match="rank 0 of 1 is not the head layout's 1 of 2"):
        ParallelContext(HeadLayout(4, 4, 2, 1, 1), parallel.tp_group)
