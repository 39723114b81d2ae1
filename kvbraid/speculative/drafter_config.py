"""What a drafter's checkpoint says about it, whatever its dialect. Torch-free.

Symbols: d draft width, d_t target width, m taps, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbraid.model.config import MLAConfig, RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """Shape and numerics that every kind of drafter has.

    dialect: whose format the file had, for messages. tap_layers: 0-based target layers whose
    output (full residual stream, before any norm) is tapped, in the order of concatenation.
    max_draft_tokens: drafts of one round as trained. mla: None for grouped-query attention.
    qk_norm: RMSNorm on each head's q and k. draft_vocab_size: equal to vocab_size where drafts
    are target ids; smaller with a map `d2t` (target id = draft id + d2t[draft id]).
    has_own_embedding, has_own_head: False where the target's are used.
    """

    dialect: str
    hidden_size: int
    target_hidden_size: int
    num_target_layers: int | None
    tap_layers: tuple[int, ...]
    num_layers: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    vocab_size: int
    draft_vocab_size: int
    max_draft_tokens: int
    mla: MLAConfig | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    has_own_embedding: bool = False
    has_own_head: bool = False

    @property
    def fused_width(self) -> int:
        """Numbers of one fused row, the drafter's view of one target position."""
        return self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(DrafterConfig):
    """One layer over [embedding ; feature] pairs, run once a draft token.

    norm_before_residual: the residual is hidden_norm(f), not f. norm_before_fc: `input_norm` over
    the concatenated taps. fc_norm: one RMSNorm a tap. norm_output: the feature fed back is
    norm(h), not h.
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkConfig(DrafterConfig):
    """A non-causal block over [anchor, mask ...] and the context rows, then a low-rank bigram head.

    predicts_from_anchor: slot k (0-based, slot 0 is the anchor itself) predicts anchor + k + 1
    and the block has max_draft_tokens slots; otherwise the anchor emits nothing, slot j predicts
    anchor + j, and the block has one slot more. markov_head: vanilla, gated or rnn.
    """

    mask_token_id: int
    markov_rank: int
    markov_head: str = "vanilla"
    has_confidence_head: bool = False
    confidence_with_markov: bool = True
    predicts_from_anchor: bool = True

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self.max_draft_tokens + (0 if self.predicts_from_anchor else 1)


AnyDrafterConfig = Eagle3Config | DSparkConfig
