"""Every published dialect of DSpark becomes one config and one set of names, or is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from kvbraid.errors import CheckpointError
from kvbraid.speculative.drafter_config import DSparkConfig
from kvbraid.speculative.drafter_source import open_drafter

SHARED_MODELS = Path(__file__).parents[5] / "shared" / "models"
SAME_DRAFTER = ("deepspec_dspark", "specforge_dspark", "speculators_dspark")
ALL = (*SAME_DRAFTER, "k3_dspark")


@pytest.mark.parametrize("dialect", SAME_DRAFTER)
def test_one_drafter_in_three_dialects_is_one_drafter(drafters, lab, dialect):
    opened = getattr(drafters, dialect)().open()
    reference = drafters.deepspec_dspark().open()
    assert isinstance(opened.config, DSparkConfig)
    changed = dataclasses.replace(opened.config, dialect="DeepSpec", num_target_layers=8)
    assert changed == reference.config
    tensors, expected = lab.read_all(opened), lab.read_all(reference)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_config_of_a_shared_embedding_and_head(drafters):
    config = drafters.deepspec_dspark().open().config
    assert config.tap_layers == (1, 3, 4)
    assert (config.num_layers, config.markov_rank, config.markov_head) == (2, 3, "vanilla")
    assert (config.mask_token_id, config.max_draft_tokens, config.block_size) == (63, 7, 7)
    assert config.has_confidence_head
    assert config.confidence_with_markov
    assert config.predicts_from_anchor
    assert not (config.has_own_embedding)
    assert not (config.has_own_head)


def test_own_embedding_and_head_are_kept(drafters, lab):
    files = drafters.deepspec_dspark()
    own = lab.random_tensors({"embed_tokens.weight": (64, 16), "lm_head.weight": (64, 16)}, 9)
    files.tensors |= own
    opened = files.open()
    assert opened.config.has_own_embedding
    assert opened.config.has_own_head
    tensors = lab.read_all(opened)
    assert all(torch.equal(tensors[name], own[name]) for name in own)


def test_kimi_k3_has_latent_attention_and_other_names(drafters, lab):
    files = drafters.k3_dspark()
    opened = files.open()
    config = opened.config
    assert config.dialect == "Kimi-K3 MLA"
    assert config.mla is not None
    assert (config.num_target_layers, config.tap_layers) == (8, (1, 3, 4))
    assert config.max_draft_tokens == 7
    tensors = lab.read_all(opened)
    for name, stored in (
        ("fc", "context_proj"),
        ("hidden_norm", "context_norm"),
        ("norm", "final_norm"),
    ):
        assert torch.equal(tensors[f"{name}.weight"], files.tensors[f"{stored}.weight"])


@pytest.mark.parametrize(("head", "name"), [("gated", "gate_proj"), ("rnn", "joint_proj")])
def test_markov_heads(drafters, lab, head, name):
    files = drafters.deepspec_dspark(markov_head_type=head)
    rows, columns = (3, 19) if head == "gated" else (9, 22)
    files.tensors[f"markov_head.{name}.weight"] = torch.ones(rows, columns)
    files.tensors[f"markov_head.{name}.bias"] = torch.ones(rows)
    assert files.open().config.markov_head == head
    del files.tensors[f"markov_head.{name}.bias"]
    with pytest.raises(CheckpointError, match=rf"{name}\.bias \[{rows}\] is missing"):
        files.open()


def test_a_draft_vocabulary_without_a_head_of_its_own(drafters, lab):
    """SpecForge: the head is the target's rows that d2t names."""
    files = drafters.specforge_dspark(draft_vocab_size=lab.DRAFT_VOCAB)
    maps = drafters.specforge().tensors
    files.tensors |= {name: maps[name] for name in ("d2t", "t2d")}
    files.tensors["markov_head.markov_w2.weight"] = torch.ones(lab.DRAFT_VOCAB, lab.RANK)
    opened = files.open()
    assert opened.config.draft_vocab_size == lab.DRAFT_VOCAB
    assert not opened.config.has_own_head
    assert "d2t" in opened.source.tensors


def test_no_confidence_head(drafters):
    files = drafters.deepspec_dspark(
        enable_confidence_head=False, confidence_head_with_markov=False
    )
    with pytest.raises(CheckpointError, match=r"confidence_head\.proj\.bias does not belong"):
        files.open()
    for name in ("weight", "bias"):
        del files.tensors[f"confidence_head.proj.{name}"]
    config = files.open().config
    assert not (config.has_confidence_head)
    assert not (config.confidence_with_markov)


def test_slots_where_the_anchor_predicts_nothing(drafters):
    config = drafters.deepspec_dspark(sample_from_anchor=False).open().config
    assert not config.predicts_from_anchor
    assert (config.block_size, config.max_draft_tokens) == (7, 6)
    assert drafters.deepspec_dspark(dspark_bonus_anchor=True).open().config == config


REFUSED_CONFIGS = [
    ("deepspec_dspark", {"brand_new_flag": 3}, "unknown key brand_new_flag = 3"),
    ("deepspec_dspark", {"architectures": ["Gemma4DSparkModel"]}, "'Gemma4DSparkModel' is refused"),
    ("deepspec_dspark", {"architectures": ["KimiK3DSpark5MLADraftModel"]}, "K3DSparkModel"),
    ("deepspec_dspark", {"is_causal": True}, "is_causal = True is refused; accepted: False"),
    ("deepspec_dspark", {"target_layer_ids": None}, "target_layer_ids = None is refused"),
    ("deepspec_dspark", {"target_layer_ids": [1, 3, 7]}, "before the last one"),
    ("deepspec_dspark", {"target_layer_ids": [-1, 3, 4]}, "accepted: 0 .. 6"),
    ("deepspec_dspark", {"target_layer_ids": [1, 3, 8]}, "accepted: 0 .. 6"),
    ("deepspec_dspark", {"target_layer_ids": [3, 1, 4]}, "in rising order"),
    ("deepspec_dspark", {"target_layer_ids": [1, 3]}, "does not fit 2 taps"),
    ("deepspec_dspark", {"target_layer_ids": "1"}, "a list of layer numbers"),
    ("deepspec_dspark", {"mask_token_id": 64}, "mask_token_id = 64 is refused; accepted: 0 .. 63"),
    ("deepspec_dspark", {"mask_token_id": None}, "mask_token_id = None is refused"),
    ("deepspec_dspark", {"markov_rank": 0}, "markov_rank = 0 is refused"),
    ("deepspec_dspark", {"markov_head_type": "lstm"}, "'lstm' is refused; accepted: gated, rnn"),
    ("deepspec_dspark", {"block_size": None}, "block_size = None is refused"),
    ("deepspec_dspark", {"num_target_layers": 36}, "num_target_layers = 36 is refused"),
    ("deepspec_dspark", {"vocab_size": 128}, "vocab_size = 128 is refused; accepted: 64"),
    ("deepspec_dspark", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    (
        "deepspec_dspark",
        {"sample_from_anchor": True, "dspark_bonus_anchor": True},
        "dspark_bonus_anchor = True is refused",
    ),
    ("speculators_dspark", {"speculators_model_type": "dflash"}, "'dflash' is refused"),
    ("speculators_dspark", {"projector_type": "domino"}, "projector_type = 'domino' is refused"),
    ("speculators_dspark", {"aux_hidden_state_layer_ids": [2, 4, 8]}, "before the last one"),
    ("k3_dspark", {"mla_use_nope": True}, "mla_use_nope = True is refused"),
    ("k3_dspark", {"mla_use_output_gate": True}, "mla_use_output_gate = True is refused"),
    ("k3_dspark", {"num_target_layers": 8}, "num_target_layers = 8 is refused; accepted: 3"),
    ("k3_dspark", {"target_num_hidden_layers": 93}, "target_num_hidden_layers = 93 is refused"),
]


@pytest.mark.parametrize(("dialect", "changes", "message"), REFUSED_CONFIGS)
def test_config_is_refused_by_key_and_value(drafters, dialect, changes, message):
    with pytest.raises(CheckpointError) as error:
        getattr(drafters, dialect)(**changes).open()
    assert message in str(error.value)
    assert "config.json" in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("projector_type", "domino"), ("attention_mode", "mla"), ("use_target_kv", True)],
)
def test_other_networks_in_specforges_section_are_refused(drafters, key, value):
    files = drafters.specforge_dspark()
    files.config["dflash_config"][key] = value
    with pytest.raises(CheckpointError, match=f"{key} = {value!r}"):
        files.open()


def test_flat_and_nested_values_must_agree(drafters):
    files = drafters.specforge_dspark(target_layer_ids=[1, 3, 4])
    assert files.open().config.tap_layers == (1, 3, 4)
    files.config["target_layer_ids"] = [1, 3, 5]
    with pytest.raises(CheckpointError, match=r"dflash_config\.target_layer_ids = \[1, 3, 4\]"):
        files.open()


@pytest.mark.parametrize("dialect", ALL)
def test_each_missing_tensor_is_named(drafters, dialect):
    for name in sorted(getattr(drafters, dialect)().tensors):
        files = getattr(drafters, dialect)()
        del files.tensors[name]
        with pytest.raises(CheckpointError, match="is missing") as error:
            files.open()
        assert canonical(name) in str(error.value)


@pytest.mark.parametrize("dialect", ALL)
def test_each_misshapen_tensor_is_named(drafters, dialect):
    for name in sorted(getattr(drafters, dialect)().tensors):
        files = getattr(drafters, dialect)()
        files.tensors[name] = torch.cat((files.tensors[name], files.tensors[name][-1:]))
        with pytest.raises(CheckpointError) as error:
            files.open()
        assert canonical(name) in str(error.value)


def canonical(name: str) -> str:
    names = {"context_proj": "fc", "context_norm": "hidden_norm", "final_norm": "norm"}
    stem = name.split(".")[0]
    return name.replace(stem, names.get(stem, stem), 1)


@pytest.mark.parametrize("name", ["tiny-mla-dspark", "smollm2-135m-dspark"])
def test_trained_drafter_opens(lab, name):
    folder = lab.ASSETS / name if (lab.ASSETS / name).is_dir() else SHARED_MODELS / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here")
    raw = json.loads((folder / "config.json").read_text())
    target = dataclasses.replace(
        lab.TARGET,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        num_layers=raw["num_target_layers"],
    )
    config = open_drafter(folder, target).config
    assert config.tap_layers == tuple(raw["target_layer_ids"])
    assert (config.max_draft_tokens, config.block_size) == (7, 7)
    assert config.has_confidence_head
    assert not config.has_own_head
