"""EAGLE3 and DSpark in float64, straight from their published formulas: no cache, no batch, no
paging, everything computed anew for every draft. Shares no code with kvbraid.speculative.

n rows are the fused rows of positions [first, first + n); d width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbraid.model.config import RopeConfig, yarn_mscale
from kvbraid.model.rope import inverse_frequencies
from kvbraid.speculative.drafter_config import AnyDrafterConfig, DSparkConfig, Eagle3Config

# Chooses a draft id: (logits [Vd], 0-based number of the draft) -> draft id.
Choose = Callable[[Tensor, int], int]

LATENT_EPS = 1e-6


def greedy(logits: Tensor, draft: int) -> int:
    return int(logits.argmax())


@dataclass
class Drafts:
    """token_ids: target ids; logits: [Vd] of each draft; confidences: where there is a head."""

    token_ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)


class Weights:
    """float64 tensors by canonical name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {n: t if n == "d2t" else t.double() for n, t in tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def get(self, name: str) -> Tensor | None:
        return self._tensors.get(name)

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self[f"{name}.weight"].T
        bias = self.get(f"{name}.bias")
        return y if bias is None else y + bias

    def rms(self, name: str, x: Tensor, eps: float) -> Tensor:
        return rms_norm(x, self[f"{name}.weight"], eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: Tensor, rope: RopeConfig, *, interleaved: bool = False) -> Tensor:
    """x [n, heads, D]. Pairs are (j, j + D/2), or (2j, 2j + 1) when interleaved."""
    dim = x.shape[-1]
    angles = positions[:, None].double() * inverse_frequencies(rope, dim).double()
    cos, sin = (rope.cos_sin_factor * f(angles)[:, None] for f in (torch.cos, torch.sin))
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def attention(
    w: Weights,
    config: AnyDrafterConfig,
    layer: int,
    queries_of: Tensor,
    keys_of: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    visible: Tensor,
) -> Tensor:
    """queries_of [m, in], keys_of [n, in], visible bool [m, n] -> [m, d]."""
    prefix = f"layers.{layer}.self_attn"
    heads = config.num_q_heads
    if config.mla is None:
        q, k, v = _gqa_heads(w, config, prefix, queries_of, keys_of, q_positions, k_positions)
        scale = 1 / math.sqrt(config.head_dim)
    else:
        q, k, v = _mla_heads(w, config, prefix, queries_of, keys_of, q_positions, k_positions)
        scale = 1 / math.sqrt(config.mla.qk_head_dim)
        if config.rope.rope_type == "yarn" and config.rope.mscale_all_dim:
            scale *= yarn_mscale(config.rope.factor, config.rope.mscale_all_dim) ** 2
    outs = []
    for h in range(heads):
        kv = h * k.shape[1] // heads
        scores = (q[:, h] @ k[:, kv].T * scale).masked_fill(~visible, -math.inf)
        outs.append(scores.softmax(-1) @ v[:, kv])
    return w.linear(f"{prefix}.o_proj", torch.cat(outs, -1))


def _gqa_heads(
    w: Weights,
    config: AnyDrafterConfig,
    prefix: str,
    queries_of: Tensor,
    keys_of: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    dim = config.head_dim
    q = w.linear(f"{prefix}.q_proj", queries_of).view(len(queries_of), -1, dim)
    k = w.linear(f"{prefix}.k_proj", keys_of).view(len(keys_of), -1, dim)
    v = w.linear(f"{prefix}.v_proj", keys_of).view(len(keys_of), -1, dim)
    if config.qk_norm:
        q = w.rms(f"{prefix}.q_norm", q, config.rms_norm_eps)
        k = w.rms(f"{prefix}.k_norm", k, config.rms_norm_eps)
    return rotate(q, q_positions, config.rope), rotate(k, k_positions, config.rope), v


def _mla_heads(
    w: Weights,
    config: AnyDrafterConfig,
    prefix: str,
    queries_of: Tensor,
    keys_of: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    mla = config.mla
    assert mla is not None
    nope, rank, inter = mla.qk_nope_head_dim, mla.kv_lora_rank, mla.rope_interleave
    low = w.rms(f"{prefix}.q_a_layernorm", w.linear(f"{prefix}.q_a_proj", queries_of), LATENT_EPS)
    q = w.linear(f"{prefix}.q_b_proj", low).view(len(queries_of), -1, mla.qk_head_dim)
    q_pe = rotate(q[..., nope:], q_positions, config.rope, interleaved=inter)
    q = torch.cat((q[..., :nope], q_pe), -1)
    down = w.linear(f"{prefix}.kv_a_proj_with_mqa", keys_of)
    latent = w.rms(f"{prefix}.kv_a_layernorm", down[:, :rank], LATENT_EPS)
    k_pe = rotate(down[:, None, rank:], k_positions, config.rope, interleaved=inter)
    up = w.linear(f"{prefix}.kv_b_proj", latent).view(len(keys_of), -1, nope + mla.v_head_dim)
    k = torch.cat((up[..., :nope], k_pe.expand(-1, up.shape[1], -1)), -1)
    return q, k, up[..., nope:]


def mlp(w: Weights, layer: int, x: Tensor) -> Tensor:
    prefix = f"layers.{layer}.mlp"
    gate = torch.nn.functional.silu(w.linear(f"{prefix}.gate_proj", x))
    return w.linear(f"{prefix}.down_proj", gate * w.linear(f"{prefix}.up_proj", x))


def embedding(w: Weights, config: AnyDrafterConfig) -> Tensor:
    name = "embed_tokens.weight" if config.has_own_embedding else "model.embed_tokens.weight"
    return w[name]


def head(w: Weights, config: AnyDrafterConfig) -> Tensor:
    """The drafter's, or what it drafts of the target's, which may be its tied embedding."""
    found = w.get("lm_head.weight")
    if found is None:
        found = w["model.embed_tokens.weight"]
    if len(found) == config.draft_vocab_size:
        return found
    return found[[target_id(w, draft_id) for draft_id in range(config.draft_vocab_size)]]


def target_id(w: Weights, draft_id: int) -> int:
    offsets = w.get("d2t")
    return draft_id if offsets is None else draft_id + int(offsets[draft_id])


def fuse(w: Weights, config: AnyDrafterConfig, taps: Tensor) -> Tensor:
    """taps [n, m, d_t] -> [n, d]."""
    taps = taps.double()
    eps = config.rms_norm_eps
    if isinstance(config, DSparkConfig):
        return w.rms("hidden_norm", w.linear("fc", taps.flatten(1)), eps)
    if config.fc_norm:
        parts = [w.rms(f"fc_norm.{i}", taps[:, i], eps) for i in range(taps.shape[1])]
        taps = torch.stack(parts, 1)
    joined = taps.flatten(1)
    if config.norm_before_fc:
        joined = w.rms("input_norm", joined, eps)
    return w.linear("fc", joined)


def eagle3_drafts(
    w: Weights,
    config: Eagle3Config,
    rows: Tensor,
    next_token_ids: list[int],
    first: int,
    num_drafts: int,
    choose: Choose = greedy,
) -> Drafts:
    """rows [n, d], n >= 1; next_token_ids[i] is the token at position first + i + 1."""
    features, tokens, eps = rows.double(), list(next_token_ids), config.rms_norm_eps
    drafts = Drafts()
    for number in range(num_drafts):
        e = embedding(w, config)[torch.tensor(tokens)]
        normed = w.rms("layers.0.hidden_norm", features, eps)
        x = torch.cat((w.rms("layers.0.input_layernorm", e, eps), normed), -1)
        positions = torch.arange(first, first + len(tokens))
        causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        attended = attention(w, config, 0, x, x, positions, positions, causal)
        h = (normed if config.norm_before_residual else features) + attended
        h = h + mlp(w, 0, w.rms("layers.0.post_attention_layernorm", h, eps))
        out = w.rms("norm", h, eps)
        logits = out[-1] @ head(w, config).T
        token = target_id(w, choose(logits, number))
        drafts.token_ids.append(token)
        drafts.logits.append(logits)
        features = torch.cat((features, (out if config.norm_output else h)[-1:]))
        tokens.append(token)
    return drafts


def dspark_drafts(
    w: Weights,
    config: DSparkConfig,
    rows: Tensor,
    first: int,
    anchor_id: int,
    num_drafts: int,
    choose: Choose = greedy,
) -> Drafts:
    """rows [n, d], n >= 0, of the positions before the anchor."""
    ctx, eps = rows.double(), config.rms_norm_eps
    size = config.max_draft_tokens + (not config.predicts_from_anchor)
    start = first + len(ctx)
    ids = [anchor_id] + [config.mask_token_id] * (size - 1)
    block = embedding(w, config)[torch.tensor(ids)]
    block_positions = torch.arange(start, start + size)
    all_positions = torch.arange(first, start + size)
    everything = torch.ones(size, len(all_positions), dtype=torch.bool)
    for layer in range(config.num_layers):
        hn = w.rms(f"layers.{layer}.input_layernorm", block, eps)
        keys_of = torch.cat((ctx, hn))
        block = block + attention(
            w, config, layer, hn, keys_of, block_positions, all_positions, everything
        )
        normed = w.rms(f"layers.{layer}.post_attention_layernorm", block, eps)
        block = block + mlp(w, layer, normed)
    hidden = w.rms("norm", block, eps)
    if not config.predicts_from_anchor:
        hidden = hidden[1:]
    return _draw(w, config, hidden, anchor_id, num_drafts, choose)


def _draw(
    w: Weights,
    config: DSparkConfig,
    hidden: Tensor,
    anchor_id: int,
    num_drafts: int,
    choose: Choose,
) -> Drafts:
    drafts, before = Drafts(), anchor_id
    state = torch.zeros(config.markov_rank, dtype=torch.float64)
    for number in range(num_drafts):
        h, w1 = hidden[number], w["markov_head.markov_w1.weight"][before]
        if config.markov_head == "gated":
            gate = w.linear("markov_head.gate_proj", torch.cat((h, w1)))
            latent = torch.sigmoid(gate) * w1
        elif config.markov_head == "rnn":
            joint = w.linear("markov_head.joint_proj", torch.cat((state, w1, h)))
            z, c, o = joint.split(config.markov_rank)
            state = torch.sigmoid(z) * state + (1 - torch.sigmoid(z)) * torch.tanh(c)
            latent = torch.tanh(o)
        else:
            latent = w1
        logits = h @ head(w, config).T + w["markov_head.markov_w2.weight"] @ latent
        for draft_id in range(len(logits)):
            if target_id(w, draft_id) == config.mask_token_id:
                logits[draft_id] = -math.inf
        if config.has_confidence_head:
            inputs = torch.cat((h, w1)) if config.confidence_with_markov else h
            level = torch.sigmoid(w.linear("confidence_head.proj", inputs))
            drafts.confidences.append(float(level))
        before = target_id(w, choose(logits, number))
        drafts.token_ids.append(before)
        drafts.logits.append(logits)
    return drafts
