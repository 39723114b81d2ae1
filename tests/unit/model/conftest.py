"""Thread groups, dense attention and random transformers models for the model tests."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from attention.interface import LatentExpansion
from attention.layout import HeadLayout
from kvbraid.model.config import ModelConfig
from kvbraid.model.loader import load_config, load_model
from kvbraid.model.parallel import ParallelContext

ASSETS = Path(__file__).parents[2] / "assets"


class ThreadGroup:
    """One rank of a group whose ranks are threads; only what the model calls."""

    def __init__(self, rank: int, size: int, slots: list, barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = size
        self._slots = slots
        self._barrier = barrier

    def all_reduce(self, tensor: Tensor) -> Tensor:
        assert tensor.is_contiguous()
        self._slots[self.rank] = tensor.clone()
        self._barrier.wait(timeout=30)
        total = self._slots[0].clone()
        for part in self._slots[1:]:
            assert part.shape == tensor.shape
            total += part
        self._barrier.wait(timeout=30)
        return tensor.copy_(total)


@dataclass
class DenseAttention:
    """Causal attention over everything seen so far, in the plainest form, for one rank.

    Latent attention is absorbed or expanded, as asked.
    """

    config: ModelConfig
    heads: HeadLayout
    q_mode: str = "gather"
    is_absorbed: bool = True
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    layers: list[int] = field(default_factory=list)

    def gqa(self, layer: int, q: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.layers.append(layer)
        kv_heads = len(self.heads.group_kv_heads)
        assert key.shape[1:] == value.shape[1:] == (kv_heads, self.config.head_dim)
        q = self._own_heads(q)
        key, value = self._append(self.keys, layer, key), self._append(self.values, layer, value)
        index = [self.heads.kv_index_of_group_q_head[h] for h in self.heads.local_heads_in_group]
        if not index:
            return q
        probabilities = self._probabilities(torch.einsum("thd,lhd->htl", q, key[:, index]))
        return torch.einsum("htl,lhd->thd", probabilities, value[:, index])

    def mla(
        self, layer: int, q_nope: Tensor, q_pe: Tensor, latent: Tensor, expansion: LatentExpansion
    ) -> Tensor:
        self.layers.append(layer)
        assert q_nope.shape[1] == q_pe.shape[1] == len(expansion.w_kc) == len(expansion.w_vc)
        q_nope, q_pe = self._own_heads(q_nope), self._own_heads(q_pe)
        own = self._own_slice()
        w_kc, w_vc = expansion.w_kc[own], expansion.w_vc[own]
        rank = w_kc.shape[2]
        cached = self._append(self.keys, layer, latent)
        low, k_pe = cached[:, :rank], cached[:, rank:]
        scores = torch.einsum("thd,ld->htl", q_pe, k_pe)
        if self.is_absorbed:
            scores += torch.einsum("thd,hdr,lr->htl", q_nope, w_kc, low)
            mixed = torch.einsum("htl,lr->thr", self._probabilities(scores), low)
            return torch.einsum("thr,hrv->thv", mixed, w_vc)
        scores += torch.einsum("thd,lhd->htl", q_nope, torch.einsum("lr,hdr->lhd", low, w_kc))
        value = torch.einsum("lr,hrv->lhv", low, w_vc)
        return torch.einsum("htl,lhv->thv", self._probabilities(scores), value)

    def _own_slice(self) -> slice:
        if self.q_mode == "gather":
            return slice(None)
        own = self.heads.local_heads_in_group
        return slice(own.start, own.stop)

    def _own_heads(self, q: Tensor) -> Tensor:
        given = self.heads.local_q_heads
        if self.q_mode == "replicate":
            given = self.heads.group_q_heads
        assert q.shape[1] == len(given)
        return q[:, self._own_slice()]

    def _append(self, cache: dict[int, Tensor], layer: int, rows: Tensor) -> Tensor:
        if layer in cache:
            rows = torch.cat((cache[layer], rows))
        cache[layer] = rows
        return rows

    def _probabilities(self, scores: Tensor) -> Tensor:
        num_queries, num_keys = scores.shape[1:]
        last_visible = torch.arange(num_queries) + num_keys - num_queries
        hidden = torch.arange(num_keys)[None] > last_visible[:, None]
        scaled = scores.float() * self.config.softmax_scale
        return scaled.masked_fill(hidden, -torch.inf).softmax(-1).to(scores.dtype)


@dataclass(frozen=True)
class Topology:
    """Ranks of a worker and how queries reach a DCP group."""

    tp_size: int = 1
    dcp_size: int = 1
    q_mode: str = "gather"


def run_topology(
    path: Path,
    chunks: list[Tensor],
    topology: Topology,
    *,
    is_absorbed: bool = True,
    start: int = 0,
    dtype: torch.dtype = torch.float32,
    on_read: Callable[[str, int], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Hidden states [T, hidden] and logits [T, V] of the chunks fed one after the other."""
    config = load_config(path)
    slots: list = [None] * topology.tp_size
    barrier = threading.Barrier(topology.tp_size)

    def run_rank(rank: int) -> tuple[Tensor, Tensor, range]:
        num_kv_heads = config.num_kv_heads if config.mla is None else 1
        heads = HeadLayout(
            config.num_q_heads, num_kv_heads, topology.tp_size, rank, topology.dcp_size
        )
        group = ThreadGroup(rank, topology.tp_size, slots, barrier)
        parallel = ParallelContext(heads, group, topology.q_mode)
        model = load_model(path, parallel=parallel, dtype=dtype, on_read=on_read)
        dense = DenseAttention(config, heads, topology.q_mode, is_absorbed)
        position = start
        hidden = []
        for chunk in chunks:
            positions = torch.arange(position, position + len(chunk))
            hidden.append(model.forward(chunk, positions, dense))
            position += len(chunk)
        assert dense.layers == list(range(config.num_layers)) * len(chunks)
        joined = torch.cat(hidden)
        return joined, model.compute_logits(joined), model.vocab_shard

    with ThreadPoolExecutor(topology.tp_size) as pool:
        results = list(pool.map(run_rank, range(topology.tp_size)))
    for hidden, _, _ in results[1:]:
        assert torch.equal(hidden, results[0][0]), "ranks disagree on the hidden states"
    assert [t for _, _, shard in results for t in shard] == list(range(config.vocab_size))
    assert all(logits.dtype == torch.float32 for _, logits, _ in results)
    return results[0][0], torch.cat([logits for _, logits, _ in results], dim=1)


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights that make every part of the model matter: norms off 1, biases off 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("inv_freq"):
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name:
                tensor.copy_(1 + 0.3 * noise)
            elif tensor.dim() == 1:
                tensor.copy_(0.2 * noise)
            else:
                tensor.copy_(noise * 1.5 / math.sqrt(tensor.shape[-1]))


@pytest.fixture
def lab() -> SimpleNamespace:
    """The helpers above, for test modules (which cannot import a conftest)."""
    return SimpleNamespace(
        ASSETS=ASSETS,
        DenseAttention=DenseAttention,
        ThreadGroup=ThreadGroup,
        Topology=Topology,
        randomize=randomize,
        run_topology=run_topology,
    )


@pytest.fixture
def solo() -> Callable[[ModelConfig], ParallelContext]:
    """The parallel context of a single rank for a config."""

    def make(config: ModelConfig) -> ParallelContext:
        num_kv_heads = config.num_kv_heads if config.mla is None else 1
        heads = HeadLayout(config.num_q_heads, num_kv_heads, 1, 0, 1)
        return ParallelContext(heads, ThreadGroup(0, 1, [None], threading.Barrier(1)))

    return make


@pytest.fixture(autouse=True)
def _single_thread() -> None:
    torch.set_num_threads(1)
