"""EAGLE3 checkpoints of SafeAILab, SpecForge, ModelOpt, TorchSpec, DeepSpec and speculators."""

from __future__ import annotations

from kvbraid.errors import CheckpointError
from kvbraid.model.raw_config import RawConfig
from kvbraid.speculative.draft_layer_fields import LayerFields, read_gqa_layers, read_mla_layers
from kvbraid.speculative.drafter_config import Eagle3Config
from kvbraid.speculative.drafter_file import DRAFTER_INERT_KEYS, DrafterFile
from kvbraid.speculative.speculators_sections import read_proposal_length, read_speculators_layer
from kvbraid.speculative.tap_layers import (
    INPUT_OF_LAYER,
    OUTPUT_OF_LAYER,
    default_tap_layers,
    read_ids,
    read_tap_layers,
)
from kvbraid.speculative.target_fit import (
    FitFields,
    check_fusion,
    read_draft_vocabulary_size,
    read_target_depth,
    read_target_hidden_size,
    read_vocabulary,
    shares_with_target,
)

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
SECTION = "eagle_config"
# Unrolled training steps of SafeAILab, SpecForge and DeepSpec where a file does not say.
DEFAULT_DRAFT_TOKENS = 7
O_BIAS = "layers.0.self_attn.o_proj.bias"


def read_llama_eagle3(file: DrafterFile) -> Eagle3Config:
    """SafeAILab's and SpecForge's layout: one Llama layer, ids of taps nested if at all."""
    dialect = "SpecForge" if SECTION in file.values else "SafeAILab"
    raw = file.merged_with(SECTION, without=(AUX_KEY,))
    layers = read_gqa_layers(
        raw, file.target, qk_norm=False, has_output_bias=O_BIAS in file.tensors
    )
    taps = _read_nested_taps(file, agreed_first_ids=(0, 1), id_of_first=OUTPUT_OF_LAYER)
    return _read_flat(raw, file, dialect, layers, taps)


def read_mla_eagle3(file: DrafterFile) -> Eagle3Config:
    """TorchSpec's and vLLM's layout of a DeepSeek-style layer; ids of taps count inputs."""
    raw = file.merged_with(SECTION, without=(AUX_KEY,))
    layers = read_mla_layers(raw, file.target)
    first_ids = tuple(range(2, file.target.num_layers))
    taps = _read_nested_taps(file, agreed_first_ids=first_ids, id_of_first=INPUT_OF_LAYER)
    return _read_flat(raw, file, "TorchSpec MLA", layers, taps)


def read_deepspec_eagle3(file: DrafterFile) -> Eagle3Config:
    """DeepSpec's layout: a Qwen3 layer, full vocabulary, `target_layer_ids` count outputs."""
    raw = file.top_level()
    raw.fixed("draft_num_hidden_layers", 1)
    layers = read_gqa_layers(raw, file.target, qk_norm=True, has_output_bias=O_BIAS in file.tensors)
    taps = read_tap_layers(raw, "target_layer_ids", file.target.num_layers, OUTPUT_OF_LAYER)
    return _read_flat(raw, file, "DeepSpec", layers, taps)


def read_speculators_eagle3(file: DrafterFile) -> Eagle3Config:
    """speculators' layout: the layer in a section of its own, ids of taps count inputs."""
    raw = file.top_level(without=("transformer_layer_config", "speculators_config"))
    raw.value("speculators_model_type")
    section, model_type = read_speculators_layer(file)
    is_qwen3 = model_type == "qwen3"
    layers = read_gqa_layers(
        section, file.target, qk_norm=is_qwen3, has_output_bias=O_BIAS in file.tensors
    )
    if not raw.has("norm_before_residual"):
        raise raw.error(
            "norm_before_residual",
            None,
            "true or false (speculators takes a missing one for false, vLLM for true)",
        )
    taps = default_tap_layers(file.origin, file.target.num_layers)
    if raw.has(AUX_KEY):
        taps = read_tap_layers(raw, AUX_KEY, file.target.num_layers, INPUT_OF_LAYER)
    vocab_size = read_vocabulary(section, file)
    section.finish(DRAFTER_INERT_KEYS | {"tie_word_embeddings"})
    draft_vocab_size = read_draft_vocabulary_size(raw, vocab_size, None)
    fit = _fit(raw, file, layers, taps, vocab_size, draft_vocab_size)
    length = read_proposal_length(file) or DEFAULT_DRAFT_TOKENS
    return _build(raw, "speculators", layers, fit, length)


def _read_flat(
    raw: RawConfig,
    file: DrafterFile,
    dialect: str,
    layers: LayerFields,
    taps: tuple[int, ...],
) -> Eagle3Config:
    vocab_size = read_vocabulary(raw, file)
    draft_vocab_size = read_draft_vocabulary_size(raw, vocab_size, vocab_size)
    raw.fixed("num_aux_hidden_states", len(taps))
    _refuse_other_heads(raw)
    fit = _fit(raw, file, layers, taps, vocab_size, draft_vocab_size)
    length = raw.integer("ttt_length", DEFAULT_DRAFT_TOKENS)
    return _build(raw, dialect, layers, fit, length)


def _read_nested_taps(
    file: DrafterFile, *, agreed_first_ids: tuple[int, ...], id_of_first: int
) -> tuple[int, ...]:
    """Taps of a layout whose writers disagree on what an id means.

    agreed_first_ids: first ids that every tool reads alike in this layout (sglang PR 25454 tells
    SpecForge's from TorchSpec's by a first id of 1 or 2). Others need a declaration.
    """
    nested, num_layers = file.section(SECTION).get(AUX_KEY), file.target.num_layers
    flat = file.values.get(AUX_KEY)
    if nested is not None and flat is not None:
        raise CheckpointError(
            f"{file.origin}: {AUX_KEY} = {flat!r} is refused: {SECTION}.{AUX_KEY} = {nested!r} "
            "is given too, and the two count differently"
        )
    if nested is None and flat is None:
        return default_tap_layers(file.origin, num_layers)
    if nested is None:
        # vLLM's own key: it hands the ids to a target that counts inputs.
        raw, id_of_first = RawConfig({AUX_KEY: flat}, file.origin), INPUT_OF_LAYER
    else:
        raw = RawConfig({AUX_KEY: nested}, f"{file.origin} ({SECTION})")
        if file.declared.aux_ids is None and read_ids(raw, AUX_KEY)[0] not in agreed_first_ids:
            raise _ambiguous_ids(raw)
    if file.declared.aux_ids is not None:
        is_output = file.declared.aux_ids == "output_of_layer"
        id_of_first = OUTPUT_OF_LAYER if is_output else INPUT_OF_LAYER
    return read_tap_layers(raw, AUX_KEY, num_layers, id_of_first)


def _ambiguous_ids(raw: RawConfig) -> CheckpointError:
    return raw.error(
        AUX_KEY,
        list(read_ids(raw, AUX_KEY)),
        "ids that all tools read alike, or in config.json "
        '"kvbraid": {"aux_layer_ids": "output_of_layer"} or "input_of_layer"',
    )


def _refuse_other_heads(raw: RawConfig) -> None:
    """Switches of ModelOpt and vLLM that would make another network."""
    raw.fixed("use_aux_hidden_state", True)
    raw.fixed("use_input_layernorm_in_first_layer", True)
    raw.fixed("use_last_layernorm", True)
    raw.fixed("use_mtp_layernorm", False)
    raw.fixed("eh_proj_before_attn", False)
    raw.fixed("parallel_draft_step", 1)
    raw.fixed("logit_scale", 1.0)
    raw.fixed("tie_word_embeddings", False)
    for key in ("next_layer_regular", "parallel_draft_heads_num_layers", "has_lm_head"):
        raw.value(key)


def _fit(
    raw: RawConfig,
    file: DrafterFile,
    layers: LayerFields,
    taps: tuple[int, ...],
    vocab_size: int,
    draft_vocab_size: int,
) -> FitFields:
    _refuse_parallel_drafting(raw, file)
    if layers["num_layers"] != 1:
        raise raw.error("num_hidden_layers", layers["num_layers"], "1, as EAGLE3 has")
    if "lm_head.weight" not in file.tensors:
        raise CheckpointError(
            f"{file.origin}: tensor lm_head.weight is missing: an EAGLE3 head is trained and "
            "cannot be the target's"
        )
    check_fusion(file, layers["hidden_size"], taps)
    own_embedding, own_head = shares_with_target(file, layers["hidden_size"])
    return FitFields(
        target_hidden_size=read_target_hidden_size(raw, file),
        num_target_layers=read_target_depth(raw, file, "num_target_layers"),
        tap_layers=taps,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        has_own_embedding=own_embedding,
        has_own_head=own_head,
    )


def _refuse_parallel_drafting(raw: RawConfig, file: DrafterFile) -> None:
    raw.fixed("parallel_drafting", False)
    if "mask_hidden" in file.tensors:
        raise CheckpointError(
            f"{file.origin}: tensor mask_hidden is of P-EAGLE's parallel drafting, which is not "
            "supported; accepted: EAGLE3, which drafts one token after the other"
        )


def _build(
    raw: RawConfig, dialect: str, layers: LayerFields, fit: FitFields, max_draft_tokens: int
) -> Eagle3Config:
    for key in ("architectures", "model_type"):
        raw.value(key)
    norm_before_fc, fc_norm = raw.flag("norm_before_fc"), raw.flag("fc_norm")
    # ModelOpt's name for the same is the second one.
    norm_output = (raw.flag("norm_output"), raw.flag("return_hidden_post_norm"))
    if norm_before_fc and fc_norm:
        raise raw.error("norm_before_fc", True, "false where fc_norm is true")
    config = Eagle3Config(
        dialect=dialect,
        max_draft_tokens=max_draft_tokens,
        norm_before_residual=raw.flag("norm_before_residual"),
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=any(norm_output),
        **layers,
        **fit,
    )
    raw.finish(DRAFTER_INERT_KEYS | {"tie_word_embeddings"})
    return config
