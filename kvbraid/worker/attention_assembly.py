"""Builds the attention of a rank: the chosen backend and exchange, sized for its steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attention.dcp import DcpAttention
from attention.exchanges.base import ExchangeLimits
from attention.interface import Group
from kvbraid.engine.captured_forward import DecodeLimits
from kvbraid.engine.ranks import RankContext
from kvbraid.engine.sampled_exchange import sampled
from kvbraid.kv.kv_layout import KvLayout
from kvbraid.model.config import ModelConfig
from kvbraid.settings import ParallelSettings
from kvbraid.worker.attention_choice import attention_needs, capture_obstacles, choose_attention
from kvbraid.worker.rank_compute import communicator_kind

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltAttention:
    """backend: its name. is_captured: whether decode is captured in graphs."""

    attention: DcpAttention
    backend: str
    is_captured: bool


def build_attention(
    *,
    config: ModelConfig,
    parallel: ParallelSettings,
    context: RankContext,
    layout: KvLayout,
    group: Group,
    limits: DecodeLimits,
    device: torch.device,
    observe_exchange: Callable[[float], object],
) -> BuiltAttention:
    """group: of DCP. A collective where the exchange owns memory. Raises ConfigError with every
    reason where no attention serves what the settings ask for."""
    heads, stripe = layout.heads(context.rank), layout.stripe(context.rank)
    num_hosts = -(-parallel.dcp_size // context.local_world_size)
    needs = attention_needs(config, parallel, heads, stripe, limits, device, num_hosts)
    communicator = communicator_kind(context, parallel)
    choice, is_captured = choose_attention(
        needs, parallel, capture_obstacles(config, communicator, parallel.tp_size)
    )
    for warning in choice.warnings:
        logger.warning(warning)
    attention = DcpAttention(
        geometry=needs.geometry,
        stripe=stripe,
        heads=heads,
        group=group,
        backend=choice.backend,
        exchange=sampled(choice.exchange, observe_exchange),
        q_mode=parallel.q_mode,
        limits=ExchangeLimits(limits.max_num_seqs * limits.max_window, limits.dtype, device),
    )
    return BuiltAttention(attention, choice.backend.name, is_captured)
