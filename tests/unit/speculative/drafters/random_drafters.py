"""Small drafters with random weights in every published form, and their targets' vocabularies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbraid.model.config import MLAConfig, ModelConfig, RopeConfig
from kvbraid.model.tensor_source import StoredTensor
from kvbraid.speculative.drafter import Drafter, build_drafter
from kvbraid.speculative.drafter_config import AnyDrafterConfig, DSparkConfig, Eagle3Config
from kvbraid.speculative.drafter_tensors import expected_tensors

VOCAB = 61
WIDTH = 24
TARGET_WIDTH = 20
NUM_TAPS = 3
MASK = 5

MLA = MLAConfig(
    q_lora_rank=10,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    rope_interleave=True,
)


class DictSource:
    """A TensorSource over tensors in memory."""

    origin = "memory"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._values = dict(tensors)

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return {name: StoredTensor(tuple(t.shape), "F32") for name, t in self._values.items()}

    def read(self, name: str, bounds: tuple[range, ...]) -> Tensor:
        return self._values[name][tuple(slice(b.start, b.stop) for b in bounds)].clone()


@dataclass(frozen=True)
class RandomDrafter:
    """weights: by canonical name, and the target's "model.embed_tokens.weight" and
    "lm_head.weight"."""

    config: AnyDrafterConfig
    weights: Mapping[str, Tensor]
    is_target_tied: bool = False

    def load(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Drafter:
        source = DictSource(self.weights)
        target = target_config(self.is_target_tied)
        return build_drafter(self.config, source, target, source, dtype=dtype, device=device)


def eagle3_config(**changes: object) -> Eagle3Config:
    base = Eagle3Config(
        dialect="test",
        hidden_size=WIDTH,
        target_hidden_size=TARGET_WIDTH,
        num_target_layers=9,
        tap_layers=(1, 4, 6),
        num_layers=1,
        intermediate_size=40,
        num_q_heads=6,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500.0),
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        max_draft_tokens=5,
        has_own_embedding=True,
        has_own_head=True,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def dspark_config(**changes: object) -> DSparkConfig:
    base = DSparkConfig(
        dialect="test",
        hidden_size=WIDTH,
        target_hidden_size=TARGET_WIDTH,
        num_target_layers=9,
        tap_layers=(1, 4, 6),
        num_layers=2,
        intermediate_size=40,
        num_q_heads=6,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500.0),
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        max_draft_tokens=4,
        qk_norm=True,
        mask_token_id=MASK,
        markov_rank=7,
        has_confidence_head=True,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


EAGLE3_FORMS: dict[str, Eagle3Config] = {
    "gqa": eagle3_config(),
    "norm_before_residual": eagle3_config(norm_before_residual=True),
    "norm_output": eagle3_config(norm_output=True),
    "biases": eagle3_config(qkv_bias=True, output_bias=True, mlp_bias=True),
    "qk_norm": eagle3_config(qk_norm=True),
    "draft_vocabulary": eagle3_config(draft_vocab_size=37),
    "target_embedding": eagle3_config(has_own_embedding=False),
    "uneven_heads": eagle3_config(num_q_heads=3, num_kv_heads=2),
    "mla": eagle3_config(mla=MLA),
    "mla_3_1": eagle3_config(mla=MLA, norm_output=True, fc_norm=True, norm_before_residual=True),
    "mla_half_split": eagle3_config(mla=replace(MLA, rope_interleave=False)),
    "yarn": eagle3_config(
        mla=MLA,
        rope=RopeConfig(
            rope_type="yarn",
            theta=500.0,
            factor=4.0,
            original_max_position_embeddings=16,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
    ),
}

DSPARK_FORMS: dict[str, DSparkConfig] = {
    "vanilla": dspark_config(),
    "gated": dspark_config(markov_head="gated"),
    "rnn": dspark_config(markov_head="rnn"),
    "from_mask_slots": dspark_config(predicts_from_anchor=False),
    "rnn_from_mask_slots": dspark_config(markov_head="rnn", predicts_from_anchor=False),
    "confidence_without_markov": dspark_config(confidence_with_markov=False),
    "no_confidence": dspark_config(has_confidence_head=False),
    "no_qk_norm_biases": dspark_config(qk_norm=False, qkv_bias=True, output_bias=True),
    "draft_vocabulary": dspark_config(draft_vocab_size=37, has_own_head=True),
    "draft_vocabulary_of_targets_head": dspark_config(draft_vocab_size=37),
    "own_head_and_embedding": dspark_config(has_own_head=True, has_own_embedding=True),
    "own_embedding": dspark_config(has_own_embedding=True),
    "mla": dspark_config(mla=MLA, qk_norm=False),
    "mla_gated": dspark_config(mla=MLA, qk_norm=False, markov_head="gated", num_layers=3),
    "one_slot": dspark_config(max_draft_tokens=1),
}


def target_config(is_tied: bool = False) -> ModelConfig:
    """As much of a target as a drafter's loader looks at."""
    return ModelConfig(
        family="llama",
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=8,
        num_layers=9,
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        tie_word_embeddings=is_tied,
        rope=RopeConfig(),
    )


def random_drafter(
    config: AnyDrafterConfig, seed: int = 0, is_target_tied: bool = False
) -> RandomDrafter:
    """Weights that make every part matter: norms off 1, biases off 0, embeddings of unit rows."""
    generator = torch.Generator().manual_seed(seed)
    shapes = dict(expected_tensors(config))
    shapes["model.embed_tokens.weight"] = shapes["lm_head.weight"] = (VOCAB, config.hidden_size)
    if config.has_own_head:
        shapes["lm_head.weight"] = (config.draft_vocab_size, config.hidden_size)
    weights = {}
    for name, shape in sorted(shapes.items()):
        noise = torch.randn(shape, generator=generator)
        if name == "d2t":
            kept = torch.randperm(VOCAB, generator=generator)[: shape[0]].sort().values
            weights[name] = kept - torch.arange(shape[0])
        elif "norm" in name:
            weights[name] = 1 + 0.3 * noise
        elif len(shape) == 1:
            weights[name] = 0.3 * noise
        elif "embed" in name or "markov_w1" in name:
            weights[name] = noise
        else:
            weights[name] = noise * 1.5 / math.sqrt(shape[-1])
    if is_target_tied and not config.has_own_head:
        del weights["lm_head.weight"]
    return RandomDrafter(config, weights, is_target_tied)
