"""Mixture of experts: routing and the experts of one rank. T tokens, E experts, k chosen each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbraid.model.config import ModelConfig, MoEConfig
from kvbraid.model.grouped_experts import GroupedExperts, can_group_experts
from kvbraid.model.layers import GatedMLP, load_mlp
from kvbraid.model.parallel import ParallelContext
from kvbraid.model.weight_reader import WeightReader


class Routing(NamedTuple):
    """experts: int64 [T, k], global ids; weights: float32 [T, k]."""

    experts: Tensor
    weights: Tensor


class Router:
    """Scores every expert in fp32 and chooses k of them; the same on every rank."""

    def __init__(self, weight: Tensor, correction_bias: Tensor | None, moe: MoEConfig) -> None:
        """weight: fp32 [E, hidden]; correction_bias: fp32 [E], for noaux_tc only."""
        self._weight = weight
        self._bias = correction_bias
        self._moe = moe

    def route(self, x: Tensor) -> Routing:
        """x: [T, hidden]."""
        logits = F.linear(x.float(), self._weight)
        if self._bias is None:
            return self._route_by_softmax(logits.softmax(-1))
        return self._route_by_sigmoid(logits.sigmoid(), self._bias)

    def _route_by_softmax(self, scores: Tensor) -> Routing:
        moe = self._moe
        if moe.topk_method == "group_limited_greedy":
            grouped = scores.view(len(scores), moe.num_groups, -1)
            scores = self._keep_best_groups(scores, grouped.amax(-1), 0.0)
        weights, experts = scores.topk(moe.num_experts_per_token, dim=-1, sorted=False)
        return Routing(experts, weights * moe.scaling_factor)

    def _route_by_sigmoid(self, scores: Tensor, bias: Tensor) -> Routing:
        """The bias sways the choice only; the weights are the scores without it."""
        moe = self._moe
        biased = scores + bias
        if moe.num_groups > 1:
            grouped = biased.view(len(biased), moe.num_groups, -1)
            biased = self._keep_best_groups(biased, grouped.topk(2, -1).values.sum(-1), -torch.inf)
        experts = biased.topk(moe.num_experts_per_token, dim=-1, sorted=False).indices
        weights = scores.gather(1, experts)
        if moe.normalize_weights:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, weights * moe.scaling_factor)

    def _keep_best_groups(self, scores: Tensor, group_scores: Tensor, rejected: float) -> Tensor:
        best = group_scores.topk(self._moe.num_groups_per_token, dim=-1, sorted=False).indices
        is_rejected = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
        per_expert = self._moe.num_experts // self._moe.num_groups
        return scores.masked_fill(is_rejected.repeat_interleave(per_expert, dim=-1), rejected)


class Experts(Protocol):
    """The whole experts that one rank keeps."""

    def add(self, out: Tensor, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """out [T, hidden] plus what this rank's experts make of x [T, hidden], in place.

        experts, weights: as in Routing; those of other ranks count for nothing.
        """
        ...


class MoELayer:
    """This rank's whole experts and its part of the shared ones; a partial sum over the ranks."""

    def __init__(self, router: Router, experts: Experts, shared: GatedMLP | None) -> None:
        self._router = router
        self._experts = experts
        self._shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        routing = self._router.route(x)
        out = torch.zeros_like(x) if self._shared is None else self._shared.forward(x)
        return self._experts.add(out, x, *routing)


class ListedExperts:
    """Implements Experts with one product after the other, of those experts that have tokens. Which
    these are is looked up on the host, so a GPU would have to be waited for in every layer."""

    def __init__(self, experts: Sequence[GatedMLP], shard: range) -> None:
        """experts: those with the global ids in `shard`."""
        self._experts = tuple(experts)
        self._shard = shard

    def add(self, out: Tensor, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """See Experts."""
        routing = Routing(experts, weights)
        if x.shape[0] == 1:
            return self._add_one_token(out, x, routing)
        return self._add_tokens(out, x, routing)

    def _add_one_token(self, out: Tensor, x: Tensor, routing: Routing) -> Tensor:
        for expert, weight in zip(
            routing.experts[0].tolist(), routing.weights[0].tolist(), strict=True
        ):
            if expert in self._shard:
                out.add_(self._experts[expert - self._shard.start].forward(x), alpha=weight)
        return out

    def _add_tokens(self, out: Tensor, x: Tensor, routing: Routing) -> Tensor:
        """Sorts the (token, expert) pairs by expert, so that idle experts cost nothing."""
        pairs = routing.experts.flatten()
        order = pairs.argsort(stable=True)
        tokens = order.div(routing.experts.shape[1], rounding_mode="floor")
        weights = routing.weights.flatten()[order].to(x.dtype)[:, None]
        ends = pairs.bincount(minlength=self._shard.stop).cumsum(0).tolist()
        for expert in self._shard:
            start, end = ends[expert - 1] if expert else 0, ends[expert]
            if start < end:
                chosen = tokens[start:end]
                result = self._experts[expert - self._shard.start].forward(x[chosen])
                out.index_add_(0, chosen, result.mul_(weights[start:end]))
        return out


def load_moe(
    reader: WeightReader, prefix: str, config: ModelConfig, parallel: ParallelContext
) -> MoELayer:
    """The MoE layer named `prefix`; another rank's experts are checked but not read."""
    moe = config.moe
    assert moe is not None
    shard = parallel.shard(moe.num_experts)
    for expert in range(moe.num_experts):
        if expert not in shard:
            for name, shape in _matrices(f"{prefix}.experts.{expert}", config, moe).items():
                reader.expect(name, shape)
    load = _load_grouped if can_group_experts(reader.device) else _load_listed
    return MoELayer(
        _load_router(reader, prefix, config, moe),
        load(reader, f"{prefix}.experts", config, moe, shard),
        _load_shared(reader, prefix, config, moe, parallel),
    )


def _matrices(name: str, config: ModelConfig, moe: MoEConfig) -> dict[str, tuple[int, int]]:
    wide = (moe.intermediate_size, config.hidden_size)
    return {
        f"{name}.gate_proj.weight": wide,
        f"{name}.up_proj.weight": wide,
        f"{name}.down_proj.weight": wide[::-1],
    }


def _load_listed(
    reader: WeightReader, prefix: str, config: ModelConfig, moe: MoEConfig, shard: range
) -> ListedExperts:
    size = moe.intermediate_size
    experts = [
        load_mlp(
            reader,
            f"{prefix}.{expert}",
            hidden_size=config.hidden_size,
            intermediate_size=size,
            part=range(size),
        )
        for expert in shard
    ]
    return ListedExperts(experts, shard)


def _load_grouped(
    reader: WeightReader, prefix: str, config: ModelConfig, moe: MoEConfig, shard: range
) -> GroupedExperts:
    size, hidden = moe.intermediate_size, config.hidden_size
    dtype, device = reader.dtype, reader.device
    gate_up = torch.empty(len(shard), 2 * size, hidden, dtype=dtype, device=device)
    down = torch.empty(len(shard), hidden, size, dtype=dtype, device=device)
    for place, expert in enumerate(shard):
        parts = gate_up[place, :size], gate_up[place, size:], down[place]
        matrices = _matrices(f"{prefix}.{expert}", config, moe)
        for part, (name, shape) in zip(parts, matrices.items(), strict=True):
            part.copy_(reader.take(name, shape))
    return GroupedExperts(gate_up, down, shard)


def _load_router(reader: WeightReader, prefix: str, config: ModelConfig, moe: MoEConfig) -> Router:
    weight = reader.take(
        f"{prefix}.gate.weight", (moe.num_experts, config.hidden_size), dtype=torch.float32
    )
    bias = None
    if moe.topk_method == "noaux_tc":
        bias = reader.take(
            f"{prefix}.gate.e_score_correction_bias", (moe.num_experts,), dtype=torch.float32
        )
    return Router(weight, bias, moe)


def _load_shared(
    reader: WeightReader,
    prefix: str,
    config: ModelConfig,
    moe: MoEConfig,
    parallel: ParallelContext,
) -> GatedMLP | None:
    if not moe.num_shared_experts:
        return None
    size = moe.intermediate_size * moe.num_shared_experts
    return load_mlp(
        reader,
        f"{prefix}.shared_experts",
        hidden_size=config.hidden_size,
        intermediate_size=size,
        part=parallel.shard(size),
        has_bias=config.mlp_bias,
        adds_bias=parallel.is_first_rank,
    )
