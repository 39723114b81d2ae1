"""Makes a rank's KV pool, as large as its memory and that of the other ranks allow."""

from __future__ import annotations

import torch

from attention.interface import Group
from attention.layout import StripeLayout
from kvbraid.errors import ConfigError
from kvbraid.kv.kv_layout import KvLayout, ranks_heads
from kvbraid.kv.page_pool import KvSpec, StripedPagePool
from kvbraid.model.config import ModelConfig
from kvbraid.settings import KvSettings
from kvbraid.worker.memory import free_bytes


def kv_spec(config: ModelConfig, layout: KvLayout, rank: int, dtype: torch.dtype) -> KvSpec:
    """What `rank` keeps of each token."""
    if config.mla is not None:
        return KvSpec("mla", config.num_layers, 1, config.mla.latent_width, 0, dtype)
    heads = len(ranks_heads(layout, rank))
    return KvSpec("gqa", config.num_layers, heads, config.head_dim, config.head_dim, dtype)


def build_pool(
    settings: KvSettings,
    spec: KvSpec,
    stripe: StripeLayout,
    *,
    useful_tokens: int,
    control_group: Group,
    device: torch.device,
) -> StripedPagePool:
    """As many pages on every rank: what was asked for, or what all of them have room for.

    useful_tokens: more than these, all ranks together, would never be used. control_group: all
    ranks of the worker, which call this in lockstep. Raises ConfigError where no page fits.
    """
    if settings.kv_cache_tokens:
        num_pages = 1 + -(-settings.kv_cache_tokens // stripe.logical_page_size)
    else:
        num_pages = _agreed_num_pages(settings, spec, stripe, useful_tokens, control_group, device)
    pool = StripedPagePool(spec, num_pages, stripe, device)
    if settings.poison_kv:
        pool.fill_nan()
    return pool


def _agreed_num_pages(
    settings: KvSettings,
    spec: KvSpec,
    stripe: StripeLayout,
    useful_tokens: int,
    control_group: Group,
    device: torch.device,
) -> int:
    """Logical pages that every rank has room for, the reserved page 0 included."""
    page_bytes = spec.num_layers * max(1, spec.num_heads) * spec.row_bytes * stripe.page_size
    budget = free_bytes(device) * settings.kv_memory_fraction
    if device.type == "cpu":
        budget /= control_group.size
    fitting = int(budget // page_bytes)
    useful = -(-useful_tokens // stripe.logical_page_size)
    mine = torch.tensor([min(fitting, useful + 1)], dtype=torch.int64)
    agreed = int(control_group.all_gather(mine).min())
    if agreed < 2:
        raise ConfigError(
            f"kv_memory_fraction {settings.kv_memory_fraction} of {free_bytes(device)} free bytes "
            f"holds no page of {page_bytes} bytes; raise it, or set kv_cache_tokens"
        )
    return agreed
