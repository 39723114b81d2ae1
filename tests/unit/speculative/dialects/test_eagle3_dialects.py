"""Every published dialect of EAGLE3 becomes one config and one set of names, or is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from kvbraid.errors import CheckpointError
from kvbraid.speculative.drafter_config import Eagle3Config
from kvbraid.speculative.drafter_source import open_drafter

SHARED_MODELS = Path(__file__).parents[5] / "shared" / "models"
SAME_DRAFTER = ("safeailab", "specforge", "speculators_eagle3")
ALL = (*SAME_DRAFTER, "deepspec_eagle3", "mla_eagle3")


@pytest.mark.parametrize("dialect", SAME_DRAFTER)
def test_one_drafter_in_three_dialects_is_one_drafter(drafters, lab, dialect):
    opened = getattr(drafters, dialect)().open()
    reference = drafters.specforge().open()
    assert isinstance(opened.config, Eagle3Config)
    assert dataclasses.replace(opened.config, dialect="SpecForge") == reference.config
    tensors, expected = lab.read_all(opened), lab.read_all(reference)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_names_and_config_are_canonical(drafters, lab):
    opened = drafters.specforge().open()
    assert set(opened.source.tensors) == {
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
        "layers.0.hidden_norm.weight",
        "layers.0.input_layernorm.weight",
        "layers.0.post_attention_layernorm.weight",
        *(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }
    config = opened.config
    assert config.tap_layers == (1, 3, 4)
    assert (config.num_layers, config.num_q_heads, config.num_kv_heads) == (1, 4, 2)
    assert (config.vocab_size, config.draft_vocab_size) == (64, 24)
    assert config.rope.theta == 5000.0
    assert config.max_draft_tokens == 7
    assert config.has_own_head
    assert not config.has_own_embedding
    assert not (config.qk_norm)
    assert not (config.qkv_bias)
    assert not (config.norm_before_residual)


def test_deepspec_has_a_qwen3_layer_five_taps_and_the_full_vocabulary(drafters):
    config = drafters.deepspec_eagle3().open().config
    assert config.dialect == "DeepSpec"
    assert config.tap_layers == (0, 1, 3, 4, 6)
    assert config.qk_norm
    assert config.draft_vocab_size == config.vocab_size
    assert config.has_own_embedding
    assert config.num_target_layers == 8


def test_deepspec_equals_speculators_of_a_qwen3_layer(drafters, lab):
    deepspec = drafters.deepspec_eagle3()
    layer = deepspec.config | {"model_type": "qwen3"}
    for key in ("target_layer_ids", "num_target_layers", "draft_num_hidden_layers"):
        del layer[key]
    for key in ("ttt_length", "step_loss_decay", "target_model_name_or_path"):
        del layer[key]
    files = drafters.speculators_eagle3(
        transformer_layer_config=layer,
        draft_vocab_size=lab.VOCAB,
        eagle_aux_hidden_state_layer_ids=[1, 2, 4, 5, 7],
    )
    files.tensors = deepspec.tensors
    config, other = files.open().config, deepspec.open().config
    changed = dataclasses.replace(config, dialect="DeepSpec", num_target_layers=8)
    assert changed == other


def test_mla_has_its_own_names_and_the_flags_of_eagle_3_1(drafters, lab):
    opened = drafters.mla_eagle3().open()
    config = opened.config
    assert config.mla is not None
    assert (config.mla.q_lora_rank, config.mla.kv_lora_rank) == (6, 5)
    assert config.mla.rope_interleave
    assert config.tap_layers == (1, 3, 4)
    assert config.fc_norm
    assert config.norm_output
    assert "layers.0.self_attn.kv_a_proj_with_mqa.weight" in opened.source.tensors
    assert "fc_norm.2.weight" in opened.source.tensors


def test_input_norm_and_residual_flags_of_speculators(drafters, lab):
    files = drafters.speculators_eagle3(norm_before_fc=True, norm_before_residual=True)
    files.tensors["input_norm.weight"] = torch.ones(3 * lab.WIDTH)
    config = files.open().config
    assert config.norm_before_fc
    assert config.norm_before_residual


def test_flags_are_found_in_modelopts_section_too(drafters, lab):
    files = drafters.specforge()
    files.config["eagle_config"] |= {
        "norm_before_fc": True,
        "return_hidden_post_norm": True,
        "use_last_layernorm": True,
        "parallel_draft_step": 1,
    }
    files.tensors["input_norm.weight"] = torch.ones(3 * lab.WIDTH)
    config = files.open().config
    assert config.norm_before_fc
    assert config.norm_output


@pytest.mark.parametrize("has_output_bias", [True, False])
def test_attention_bias(drafters, lab, has_output_bias):
    files = drafters.specforge(attention_bias=True)
    for name, size in (("q", 16), ("k", 8), ("v", 8), ("o", 16)):
        if name != "o" or has_output_bias:
            files.tensors[f"midlayer.self_attn.{name}_proj.bias"] = torch.ones(size)
    config = files.open().config
    assert config.qkv_bias
    assert config.output_bias is has_output_bias
    del files.tensors["midlayer.self_attn.v_proj.bias"]
    with pytest.raises(CheckpointError, match=r"v_proj\.bias \[8\] is missing"):
        files.open()


def test_a_draft_of_another_width_brings_its_own_embedding(drafters, lab):
    files = drafters.specforge()
    wide = dataclasses.replace(lab.TARGET, hidden_size=20)
    files.tensors["fc.weight"] = torch.ones(16, 60)
    files.config["target_hidden_size"] = 20
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is missing.* width 20"):
        files.open(wide)
    files.tensors["embed_tokens.weight"] = torch.ones(64, 16)
    config = files.open(wide).config
    assert (config.hidden_size, config.target_hidden_size) == (16, 20)


def test_sharded_and_half_precision_files_open(drafters):
    files = drafters.safeailab()
    files.tensors = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in files.tensors.items()
    }
    assert files.open().source.tensors["fc.weight"].format == "F16"


def test_training_leftovers_are_skipped(drafters, lab):
    files = drafters.speculators_eagle3()
    files.tensors["verifier_lm_head.weight"] = torch.ones(24, 16)
    files.tensors["rotary_emb.inv_freq"] = torch.ones(2)
    assert files.open().config.dialect == "speculators"


def test_default_length_comes_from_the_file(drafters):
    assert drafters.specforge(ttt_length=5).open().config.max_draft_tokens == 5
    methods = [
        {"proposal_type": "suffix", "speculative_tokens": 8},
        {"proposal_type": "greedy", "speculative_tokens": 3},
    ]
    section = {"default_proposal_method": "greedy", "proposal_methods": methods}
    files = drafters.speculators_eagle3(speculators_config=section)
    assert files.open().config.max_draft_tokens == 3


def test_speculators_may_leave_out_what_transformers_has_as_default(drafters):
    files = drafters.speculators_eagle3()
    del files.config["transformer_layer_config"]["num_attention_heads"]
    with pytest.raises(CheckpointError, match=r"q_proj\.weight has shape \[16, 32\].*\[128, 32\]"):
        files.open()


REFUSED_CONFIGS = [
    ("specforge", {"brand_new_flag": 3}, "unknown key brand_new_flag = 3"),
    ("specforge", {"architectures": ["Gemma4Eagle3Model"]}, "'Gemma4Eagle3Model' is refused"),
    ("specforge", {"architectures": None}, "architectures = None is refused"),
    ("specforge", {"parallel_drafting": True}, "parallel_drafting = True is refused"),
    ("specforge", {"sliding_window": 512, "use_sliding_window": None}, "sliding_window = 512"),
    ("specforge", {"use_sliding_window": True}, "use_sliding_window = True is refused"),
    ("specforge", {"layer_types": ["sliding_attention"]}, "layer_types"),
    ("specforge", {"tie_word_embeddings": True}, "tie_word_embeddings = True is refused"),
    ("specforge", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is refused; accepted: 'silu'"),
    ("specforge", {"num_hidden_layers": 2}, "num_hidden_layers = 2 is refused; accepted: 1"),
    ("specforge", {"vocab_size": 63}, "vocab_size = 63 is refused; accepted: 64"),
    ("specforge", {"draft_vocab_size": 65}, "draft_vocab_size = 65 is refused; accepted: at most"),
    ("specforge", {"target_hidden_size": 32}, "target_hidden_size = 32 is refused; accepted: 16"),
    ("specforge", {"num_target_layers": 9}, "num_target_layers = 9 is refused; accepted: 8"),
    ("specforge", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("specforge", {"rope_scaling": {"rope_type": "dynamic"}}, "rope_type = 'dynamic' is refused"),
    ("specforge", {"norm_before_fc": True, "fc_norm": True}, "norm_before_fc = True is refused"),
    ("speculators_eagle3", {"speculators_model_type": "peagle"}, "'peagle' is refused"),
    ("speculators_eagle3", {"norm_before_residual": None}, "norm_before_residual = None"),
    ("speculators_eagle3", {"draft_vocab_size": None}, "draft_vocab_size = None is refused"),
    ("speculators_eagle3", {"transformer_layer_config": None}, "transformer_layer_config is"),
    ("deepspec_eagle3", {"target_layer_ids": None}, "target_layer_ids = None is refused"),
    ("mla_eagle3", {"q_lora_rank": None}, "q_lora_rank = None is refused"),
    ("mla_eagle3", {"attention_bias": True}, "attention_bias = True is refused"),
]


@pytest.mark.parametrize(("dialect", "changes", "message"), REFUSED_CONFIGS)
def test_config_is_refused_by_key_and_value(drafters, dialect, changes, message):
    with pytest.raises(CheckpointError) as error:
        getattr(drafters, dialect)(**changes).open()
    assert message in str(error.value)
    assert "config.json" in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_last_layernorm", False),
        ("use_mtp_layernorm", True),
        ("use_aux_hidden_state", False),
        ("use_input_layernorm_in_first_layer", False),
        ("parallel_draft_step", 2),
        ("eh_proj_before_attn", True),
        ("something_else", 1),
    ],
)
def test_switches_of_modelopt_that_make_another_network_are_refused(drafters, key, value):
    files = drafters.specforge()
    files.config["eagle_config"][key] = value
    with pytest.raises(CheckpointError, match=f"{key} = {value}"):
        files.open()


def test_sections_that_disagree_with_the_top_level_are_refused(drafters):
    files = drafters.specforge(fc_norm=False)
    files.config["eagle_config"]["fc_norm"] = True
    with pytest.raises(CheckpointError, match=r"eagle_config\.fc_norm = True is refused: fc_norm"):
        files.open()


@pytest.mark.parametrize("dialect", ALL)
def test_each_missing_tensor_is_named(drafters, dialect):
    for name in sorted(getattr(drafters, dialect)().tensors):
        if name in ("t2d", "embed_tokens.weight"):
            continue
        files = getattr(drafters, dialect)()
        del files.tensors[name]
        with pytest.raises(CheckpointError, match="is missing") as error:
            files.open()
        assert name.replace("midlayer.", "layers.0.") in str(error.value)


@pytest.mark.parametrize("dialect", ALL)
def test_each_misshapen_tensor_is_named(drafters, dialect):
    for name in sorted(getattr(drafters, dialect)().tensors):
        files = getattr(drafters, dialect)()
        files.tensors[name] = torch.cat((files.tensors[name], files.tensors[name][-1:]))
        with pytest.raises(CheckpointError) as error:
            files.open()
        assert name.replace("midlayer.", "layers.0.") in str(error.value)


@pytest.mark.parametrize(
    "name", ["midlayer.self_attn.q_norm.weight", "fc.bias", "input_norm.weight", "verifier_x"]
)
def test_a_tensor_too_many_is_named(drafters, name):
    files = drafters.specforge()
    files.tensors[name] = torch.ones(4)
    shown = name.replace("midlayer.", r"layers.0.")
    with pytest.raises(CheckpointError, match=f"tensor {shown} does not belong to this model"):
        files.open()


def test_parallel_drafting_is_recognised_by_its_tensor(drafters):
    files = drafters.specforge()
    files.tensors["mask_hidden"] = torch.ones(1, 48)
    with pytest.raises(CheckpointError, match="P-EAGLE"):
        files.open()


def test_one_tensor_under_two_names_is_refused(drafters):
    files = drafters.specforge()
    files.tensors["layers.0.hidden_norm.weight"] = torch.ones(16)
    with pytest.raises(CheckpointError, match=r"are both layers\.0\.hidden_norm\.weight"):
        files.open()


def test_integer_weights_are_refused(drafters):
    files = drafters.specforge()
    files.tensors["fc.weight"] = files.tensors["fc.weight"].to(torch.int8)
    with pytest.raises(CheckpointError, match=r"fc\.weight is I8; accepted: F32, F16, BF16"):
        files.open()


def test_pickles_are_refused_with_advice(drafters):
    folder = drafters.safeailab().write()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*convert them to safetensors"):
        open_drafter(folder, None)


@pytest.mark.parametrize("text", ["[1]", "{", "\xff"])
def test_a_damaged_config_is_refused(drafters, lab, text):
    folder = drafters.safeailab().write()
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_drafter(folder, lab.TARGET)


def test_a_file_instead_of_a_folder_is_refused(drafters, lab):
    path = drafters.safeailab().write() / "model.safetensors"
    with pytest.raises(CheckpointError, match="a drafter is a folder"):
        open_drafter(path, lab.TARGET)


def test_a_plain_llama_is_not_a_drafter(lab, drafters):
    files = drafters.safeailab()
    files.tensors = {"lm_head.weight": files.tensors["lm_head.weight"]}
    with pytest.raises(CheckpointError, match=r"fc\.weight is missing"):
        files.open()


@pytest.mark.parametrize("name", ["tiny-mla-eagle3", "smollm2-135m-eagle3"])
def test_trained_drafter_opens(lab, name):
    """The real files: ids [0, 2, 4] and [1, 14, 26] count outputs."""
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
    opened = open_drafter(folder, target)
    config = opened.config
    ids = raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert config.tap_layers == tuple(ids)
    assert config.max_draft_tokens == 5
    assert config.draft_vocab_size == raw["draft_vocab_size"] < config.vocab_size
    offsets = opened.source.read("d2t", (range(config.draft_vocab_size),))
    assert offsets.dtype == torch.int64
    assert offsets.min() >= 0
