"""Loader mistakes that other engines shipped, by their row in the bug log of spec.md section 6.

Each was silent there: the output stayed right and the acceptance collapsed.
"""

from __future__ import annotations

import pytest
import torch

from kvbraid.errors import CheckpointError


def test_row_4_slot_convention_of_speculators(drafters):
    """sglang 30261: drafts one position late, acceptance length 1.1 instead of 4."""
    files = drafters.speculators_dspark(sample_from_anchor=False)
    config = files.open().config
    assert not config.predicts_from_anchor
    assert (config.block_size, config.max_draft_tokens) == (7, 6)


def test_row_4_older_exports_state_the_convention_by_their_proposal_length(drafters):
    files = drafters.speculators_dspark()
    del files.config["sample_from_anchor"]
    method = files.config["speculators_config"]["proposal_methods"][0]
    method["speculative_tokens"] = 6
    assert not files.open().config.predicts_from_anchor


@pytest.mark.parametrize("num_proposed", [7, 5, None])
def test_row_4_a_file_that_does_not_tell_is_refused(drafters, num_proposed):
    files = drafters.speculators_dspark()
    del files.config["sample_from_anchor"]
    files.config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = num_proposed
    message = f"sample_from_anchor = None is refused.*speculative_tokens = {num_proposed} do not"
    with pytest.raises(CheckpointError, match=message):
        files.open()


@pytest.mark.parametrize("dialect", ["safeailab", "specforge", "speculators_eagle3"])
def test_row_7_the_drafts_2048_positions_are_nominal(drafters, dialect):
    """vllm 48894: garbage past position 2048. A yarn that does not say what it stretches takes
    the target's length, and nothing else depends on the draft's."""
    files = getattr(drafters, dialect)()
    section = files.config.get("transformer_layer_config", files.config)
    short = files.open().config
    section["max_position_embeddings"] = 131072
    assert files.open().config == short
    section["max_position_embeddings"] = 2048
    section["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0}
    assert files.open().config.rope.original_max_position_embeddings == 8192


# The same three tensors, as each dialect numbers them.
IDS_OF_ONE_DRAFTER = [
    ("specforge", "eagle_config", [1, 3, 4]),
    ("mla_eagle3", "eagle_config", [2, 4, 5]),
    ("speculators_eagle3", None, [2, 4, 5]),
]


@pytest.mark.parametrize(("dialect", "section", "ids"), IDS_OF_ONE_DRAFTER)
def test_row_8_ids_of_taps_count_from_the_dialects_own_zero(drafters, dialect, section, ids):
    """sglang 25454, 32334; vllm 43671: taps one layer off, acceptance length 1.04."""
    key = "eagle_aux_hidden_state_layer_ids"
    files = getattr(drafters, dialect)()
    place = files.config[section] if section else files.config
    place[key] = ids
    assert files.open().config.tap_layers == (1, 3, 4)
    del place[key]
    assert files.open().config.tap_layers == (1, 3, 4), "the default"
    place[key] = [i + 1 for i in ids[:-1]] + [ids[-1] + 2]
    if dialect != "specforge":
        assert files.open().config.tap_layers == (2, 4, 6)


@pytest.mark.parametrize(("dialect", "ids"), [("specforge", [2, 4, 5]), ("mla_eagle3", [1, 3, 4])])
def test_row_8_ids_that_tools_read_differently_need_a_declaration(drafters, dialect, ids):
    files = getattr(drafters, dialect)()
    files.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
    with pytest.raises(CheckpointError, match="ids that all tools read alike") as error:
        files.open()
    assert '"kvbraid": {"aux_layer_ids": "output_of_layer"}' in str(error.value)
    files.config["kvbraid"] = {"aux_layer_ids": "output_of_layer"}
    assert files.open().config.tap_layers == tuple(ids)
    files.config["kvbraid"] = {"aux_layer_ids": "input_of_layer"}
    assert files.open().config.tap_layers == tuple(i - 1 for i in ids)


def test_row_8_vllms_own_key_counts_inputs(drafters):
    files = drafters.specforge(eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    with pytest.raises(CheckpointError, match="is given too, and the two count differently"):
        files.open()
    del files.config["eagle_config"]
    assert files.open().config.tap_layers == (1, 3, 4)


@pytest.mark.parametrize("ids", [[1, 3, 7], [24, 30, 36], [1, 1, 4]])
def test_row_8_taps_at_the_end_or_outside_are_refused(drafters, ids):
    files = drafters.specforge()
    files.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
    with pytest.raises(CheckpointError, match="eagle_aux_hidden_state_layer_ids"):
        files.open()


def test_row_8_a_norm_before_fc_is_not_ignored(drafters):
    files = drafters.specforge()
    files.tensors["input_norm.weight"] = torch.ones(48)
    with pytest.raises(CheckpointError, match=r"input_norm\.weight does not belong"):
        files.open()
    files.config["norm_before_fc"] = True
    assert files.open().config.norm_before_fc
    del files.tensors["input_norm.weight"]
    with pytest.raises(CheckpointError, match=r"input_norm\.weight \[48\] is missing"):
        files.open()


def test_row_8_the_number_of_taps_must_fit_fc(drafters):
    files = drafters.specforge()
    files.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 3]
    with pytest.raises(CheckpointError, match=r"fc\.weight \[16, 48\] does not fit 2 taps"):
        files.open()


@pytest.mark.parametrize("dialect", ["safeailab", "specforge", "deepspec_eagle3", "mla_eagle3"])
def test_row_9_an_eagle3_without_lm_head_is_refused(drafters, dialect):
    """sglang 27829: the head stayed random, acceptance length 1.0."""
    files = getattr(drafters, dialect)()
    del files.tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing: an EAGLE3 head"):
        files.open()


def test_row_10_the_drafts_own_embedding_is_kept(drafters, lab):
    """vllm 28549: overwritten by the target's, 1.32 instead of 2.49."""
    files = drafters.specforge()
    own = lab.random_tensors({"embed_tokens.weight": (64, 16)}, 5)["embed_tokens.weight"]
    files.tensors["embed_tokens.weight"] = own
    opened = files.open()
    assert opened.config.has_own_embedding
    assert torch.equal(lab.read_all(opened)["embed_tokens.weight"], own)


def test_row_11_a_map_that_was_not_saved_is_refused(drafters):
    """Automodel 2447: without d2t the draft's tokens are other words."""
    files = drafters.specforge()
    del files.tensors["d2t"]
    with pytest.raises(CheckpointError, match=r"d2t is missing; accepted: the map of 24 draft ids"):
        files.open()


def test_row_11_an_all_zero_map_is_refused_unless_declared(drafters, lab):
    files = drafters.specforge()
    files.tensors["d2t"] = torch.zeros(24, dtype=torch.int64)
    with pytest.raises(CheckpointError, match="d2t is all zero") as error:
        files.open()
    assert '"kvbraid": {"draft_vocabulary": "first_ids"}' in str(error.value)
    files.config["kvbraid"] = {"draft_vocabulary": "first_ids"}
    with pytest.raises(CheckpointError, match="t2d 24 and not the same"):
        files.open()
    files.tensors["t2d"][:] = False
    assert not lab.read_all(files.open())["d2t"].any()
    del files.tensors["d2t"]
    assert lab.read_all(files.open())["d2t"].shape == (24,)


def test_row_11_maps_round_trip(drafters, lab):
    files = drafters.specforge()
    ids = torch.arange(24) + lab.read_all(files.open())["d2t"]
    assert torch.equal(ids, files.tensors["t2d"].nonzero()[:, 0])


def test_row_11_maps_that_contradict_each_other_are_refused(drafters):
    files = drafters.specforge()
    files.tensors["t2d"] = files.tensors["t2d"].roll(1)
    with pytest.raises(CheckpointError, match="names 24 target ids, t2d 24 and not the same"):
        files.open()


def test_row_11_target_ids_in_place_of_offsets_are_refused(drafters):
    files = drafters.specforge()
    files.tensors["d2t"] = files.tensors["d2t"] + torch.arange(24)
    with pytest.raises(CheckpointError, match=r"accepted: offsets \(not target ids\)"):
        files.open()


def test_row_11_two_draft_ids_for_one_target_id_are_refused(drafters):
    files = drafters.specforge()
    files.tensors["d2t"][1] = files.tensors["d2t"][0] - 1
    with pytest.raises(CheckpointError, match="two draft ids to one target id"):
        files.open()


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_row_11_format_of_the_map(drafters, lab, dtype):
    files = drafters.specforge()
    files.tensors["d2t"] = files.tensors["d2t"].to(dtype)
    if dtype == torch.int32:
        assert lab.read_all(files.open())["d2t"].dtype == torch.int64
        return
    with pytest.raises(CheckpointError, match=r"d2t is F32 \[24\]; accepted: I64 or I32 \[24\]"):
        files.open()


def test_row_11_a_full_vocabulary_needs_no_map(drafters, lab):
    files = drafters.deepspec_eagle3()
    files.tensors["d2t"] = torch.zeros(64, dtype=torch.int64)
    files.tensors["t2d"] = torch.ones(64, dtype=torch.bool)
    assert "d2t" not in files.open().source.tensors
    files.tensors["d2t"][3] = 1
    with pytest.raises(CheckpointError, match="d2t moves ids"):
        files.open()


def test_row_29_one_kimi_k3_draft_is_not_read_as_the_other(drafters):
    """vllm-ascend 14875: 0% accepted. Both are DSpark for one target; only one is latent."""
    gqa, latent = drafters.specforge_dspark(), drafters.k3_dspark()
    gqa.config["architectures"] = ["K3DSparkModel"]
    latent.config["architectures"] = ["DSparkDraftModel"]
    for files in (gqa, latent):
        with pytest.raises(CheckpointError):
            files.open()
    latent = drafters.k3_dspark()
    latent.tensors = drafters.specforge_dspark().tensors
    with pytest.raises(CheckpointError, match=r"self_attn\.q_a_proj\.weight.* is missing"):
        latent.open()


@pytest.mark.parametrize("section", [{"aux_layer_ids": "neither"}, {"other": 1}, [1]])
def test_unknown_declarations_are_refused(drafters, section):
    files = drafters.specforge(kvbraid=section)
    with pytest.raises(CheckpointError, match="kvbraid"):
        files.open()
