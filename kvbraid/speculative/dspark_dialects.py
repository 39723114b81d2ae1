"""DSpark checkpoints of DeepSpec, SpecForge, speculators and Kimi-K3 (latent attention)."""

from __future__ import annotations

from kvbraid.model.raw_config import RawConfig
from kvbraid.speculative.draft_layer_fields import LayerFields, read_gqa_layers, read_mla_layers
from kvbraid.speculative.drafter_config import DSparkConfig
from kvbraid.speculative.drafter_file import DRAFTER_INERT_KEYS, DrafterFile
from kvbraid.speculative.speculators_sections import read_proposal_length, read_speculators_layer
from kvbraid.speculative.tap_layers import INPUT_OF_LAYER, OUTPUT_OF_LAYER, read_tap_layers
from kvbraid.speculative.target_fit import (
    FitFields,
    check_fusion,
    read_draft_vocabulary_size,
    read_target_depth,
    read_target_hidden_size,
    read_vocabulary,
    shares_with_target,
)

SECTION = "dflash_config"
MARKOV_HEADS = ("vanilla", "gated", "rnn")
O_BIAS = "layers.0.self_attn.o_proj.bias"
# Kimi-K3's config has no block size; it was trained on blocks of seven.
K3_BLOCK_SIZE = 7
# Fields of DFlash and Domino in every speculators file: not read by DSpark.
SPECULATORS_INERT_KEYS = frozenset(
    {
        "auf",
        "emb_dim",
        "gru_hidden_dim",
        "lambda_base_decay_ratio",
        "lambda_base_start",
        "pure_draft_prefix_len",
        "sliding_window_non_causal",
        "use_aux_hidden_state",
    }
)


def read_deepspec_dspark(file: DrafterFile) -> DSparkConfig:
    """DeepSpec's flat keys (`Qwen3DSparkModel`), repeated in SpecForge's section in some files."""
    return _read_gqa(file, "DeepSpec")


def read_specforge_dspark(file: DrafterFile) -> DSparkConfig:
    """SpecForge's layout (`DSparkDraftModel`): the head's keys nested in `dflash_config`."""
    return _read_gqa(file, "SpecForge")


def read_speculators_dspark(file: DrafterFile) -> DSparkConfig:
    """speculators' layout: layers in a section of their own, ids of taps count inputs, and a
    convention for the anchor's slot that older files do not state."""
    raw = file.top_level(without=("transformer_layer_config", "speculators_config"))
    raw.value("speculators_model_type")
    raw.choice("projector_type", ("dflash", "dspark"), "dflash")
    raw.fixed("shift_label", False)
    section, _ = read_speculators_layer(file)
    layers = read_gqa_layers(
        section, file.target, qk_norm=True, has_output_bias=O_BIAS in file.tensors
    )
    taps = read_tap_layers(
        raw, "aux_hidden_state_layer_ids", file.target.num_layers, INPUT_OF_LAYER
    )
    vocab_size = read_vocabulary(section, file)
    section.finish(DRAFTER_INERT_KEYS | {"tie_word_embeddings"})
    draft_vocab_size = read_draft_vocabulary_size(raw, vocab_size, None)
    fit = _fit(raw, file, layers, taps, vocab_size, draft_vocab_size)
    block_size = raw.integer("block_size", minimum=2)
    from_anchor = _read_slot_convention(raw, default=None)
    if from_anchor is None:
        from_anchor = _infer_slot_convention(raw, block_size, read_proposal_length(file))
    return _build(raw, "speculators", layers, fit, block_size, from_anchor)


def read_k3_dspark(file: DrafterFile) -> DSparkConfig:
    """Kimi-K3's layout (`K3DSparkModel`). Its num_target_layers counts taps, not layers."""
    raw = file.top_level()
    raw.fixed("mla_use_nope", False)
    raw.fixed("mla_use_output_gate", False)
    layers = read_mla_layers(raw, file.target)
    taps = read_tap_layers(raw, "target_layer_ids", file.target.num_layers, OUTPUT_OF_LAYER)
    raw.fixed("num_target_layers", len(taps))
    vocab_size = read_vocabulary(raw, file)
    draft_vocab_size = read_draft_vocabulary_size(raw, vocab_size, vocab_size)
    fit = _fit(
        raw, file, layers, taps, vocab_size, draft_vocab_size, depth_key="target_num_hidden_layers"
    )
    block_size = raw.integer("block_size", K3_BLOCK_SIZE, minimum=2)
    from_anchor = _read_slot_convention(raw, default=True)
    return _build(raw, "Kimi-K3 MLA", layers, fit, block_size, from_anchor is not False)


def _read_gqa(file: DrafterFile, dialect: str) -> DSparkConfig:
    raw = file.merged_with(SECTION)
    raw.choice("projector_type", ("dspark",), "dspark")
    raw.choice("attention_mode", ("gqa",), "gqa")
    layers = read_gqa_layers(raw, file.target, qk_norm=True, has_output_bias=O_BIAS in file.tensors)
    taps = read_tap_layers(raw, "target_layer_ids", file.target.num_layers, OUTPUT_OF_LAYER)
    vocab_size = read_vocabulary(raw, file)
    draft_vocab_size = read_draft_vocabulary_size(raw, vocab_size, vocab_size)
    fit = _fit(raw, file, layers, taps, vocab_size, draft_vocab_size)
    block_size = raw.integer("block_size", minimum=2)
    from_anchor = _read_slot_convention(raw, default=True)
    return _build(raw, dialect, layers, fit, block_size, from_anchor is not False)


def _read_slot_convention(raw: RawConfig, *, default: bool | None) -> bool | None:
    """Whether the anchor's slot predicts. vLLM's `dspark_bonus_anchor` says the opposite."""
    stated = []
    if raw.has("sample_from_anchor"):
        stated.append(raw.flag("sample_from_anchor"))
    if raw.has("dspark_bonus_anchor"):
        stated.append(not raw.flag("dspark_bonus_anchor"))
    if len(set(stated)) > 1:
        raise raw.error(
            "dspark_bonus_anchor", stated[0], f"the opposite of sample_from_anchor = {stated[0]}"
        )
    return stated[0] if stated else default


def _infer_slot_convention(raw: RawConfig, block_size: int, num_proposed: int | None) -> bool:
    """Exports from before the key existed drafted with the masks only, one less than the block.

    Raises CheckpointError when the file does not show that: a wrong guess drafts every token one
    position late (sglang issue 30261: acceptance length 1.1 instead of 4).
    """
    if num_proposed == block_size - 1:
        return False
    raise raw.error(
        "sample_from_anchor",
        None,
        "true (each slot predicts the token after it) or false (the anchor's slot predicts "
        f"nothing); block_size = {block_size} and speculative_tokens = {num_proposed} do not tell",
    )


def _fit(
    raw: RawConfig,
    file: DrafterFile,
    layers: LayerFields,
    taps: tuple[int, ...],
    vocab_size: int,
    draft_vocab_size: int,
    depth_key: str = "num_target_layers",
) -> FitFields:
    check_fusion(file, layers["hidden_size"], taps)
    own_embedding, own_head = shares_with_target(file, layers["hidden_size"])
    return FitFields(
        target_hidden_size=read_target_hidden_size(raw, file),
        num_target_layers=read_target_depth(raw, file, depth_key),
        tap_layers=taps,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        has_own_embedding=own_embedding,
        has_own_head=own_head,
    )


def _build(
    raw: RawConfig,
    dialect: str,
    layers: LayerFields,
    fit: FitFields,
    block_size: int,
    predicts_from_anchor: bool,
) -> DSparkConfig:
    for key in ("architectures", "model_type"):
        raw.value(key)
    raw.fixed("tie_word_embeddings", False)
    raw.fixed("is_causal", False)
    raw.fixed("causal", False)
    mask_token_id = raw.integer("mask_token_id", minimum=0)
    if mask_token_id >= fit["vocab_size"]:
        raise raw.error("mask_token_id", mask_token_id, f"0 .. {fit['vocab_size'] - 1}")
    has_confidence_head = raw.flag("enable_confidence_head")
    with_markov = raw.flag("confidence_head_with_markov")
    config = DSparkConfig(
        dialect=dialect,
        max_draft_tokens=block_size if predicts_from_anchor else block_size - 1,
        mask_token_id=mask_token_id,
        markov_rank=raw.integer("markov_rank"),
        markov_head=raw.choice("markov_head_type", MARKOV_HEADS, "vanilla"),
        has_confidence_head=has_confidence_head,
        confidence_with_markov=has_confidence_head and with_markov,
        predicts_from_anchor=predicts_from_anchor,
        **layers,
        **fit,
    )
    raw.finish(DRAFTER_INERT_KEYS | SPECULATORS_INERT_KEYS)
    return config
