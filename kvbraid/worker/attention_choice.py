"""Which attention a worker takes, and whether its decode runs as captured graphs: decided once, at
start-up, with every reason why not."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from attention.dispatch import AttentionChoice, AttentionNeeds, UnsupportedCombination, choose
from attention.interface import GQAGeometry, MLAGeometry
from attention.layout import HeadLayout, StripeLayout
from kvbraid.engine.captured_forward import DecodeLimits
from kvbraid.errors import ConfigError
from kvbraid.model.config import ModelConfig
from kvbraid.settings import ParallelSettings

logger = logging.getLogger(__name__)


def attention_needs(
    config: ModelConfig,
    parallel: ParallelSettings,
    heads: HeadLayout,
    stripe: StripeLayout,
    limits: DecodeLimits,
    device: torch.device,
    num_hosts: int,
) -> AttentionNeeds:
    """What a worker asks of its attention. num_hosts: over which a DCP group is spread.

    Kernels bound the sequences of a step, however many tokens their windows have.
    """
    return AttentionNeeds(
        geometry=_geometry(config),
        num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads,
        tp_size=parallel.tp_size,
        dcp_size=parallel.dcp_size,
        page_size=stripe.page_size,
        interleave=stripe.interleave,
        device=device.type,
        dtype=limits.dtype,
        kv_dtype=limits.dtype,
        q_mode=parallel.q_mode,
        num_hosts=num_hosts,
        max_batch_size=limits.max_num_seqs,
        operations=frozenset({"decode", "verify", "extend"}),
    )


def _geometry(config: ModelConfig) -> GQAGeometry | MLAGeometry:
    mla = config.mla
    if mla is None:
        return GQAGeometry(config.head_dim, config.softmax_scale)
    return MLAGeometry(
        kv_lora_rank=mla.kv_lora_rank,
        qk_nope_head_dim=mla.qk_nope_head_dim,
        qk_rope_head_dim=mla.qk_rope_head_dim,
        v_head_dim=mla.v_head_dim,
        softmax_scale=config.softmax_scale,
    )


def capture_obstacles(config: ModelConfig, communicator: str, tp_size: int) -> list[str]:
    """Reasons against graphs that no attention backend could change, on a GPU.

    communicator: the kind that the ranks use.
    """
    reasons = []
    if tp_size > 1 and communicator != "nccl":
        reasons.append(
            f"communicator {communicator!r} waits on the host in every collective: only nccl's "
            "can be captured"
        )
    if config.moe is not None and importlib.util.find_spec("triton") is None:
        reasons.append("without triton, layers with experts wait for their routing on the host")
    return reasons


def choose_attention(
    needs: AttentionNeeds, parallel: ParallelSettings, obstacles: Sequence[str]
) -> tuple[AttentionChoice, bool]:
    """Backend and exchange as the settings want them, and whether decode is captured in graphs.

    obstacles: `capture_obstacles`. `auto` takes graphs on GPUs wherever nothing stands against
    them, and says so once where something does. Raises ConfigError with every reason where no
    attention serves, or where graphs were asked for and cannot be had.
    """
    wanted = parallel.cuda_graphs
    if wanted == "never" or (wanted == "auto" and needs.device != "cuda"):
        return _choose(needs, parallel), False
    reasons = list(obstacles)
    try:
        choice = _choose(replace(needs, cuda_graphs=True), parallel)
    except ConfigError as error:
        reasons.append(str(error))
    else:
        if not reasons:
            return choice, True
    if wanted == "always":
        raise ConfigError(
            f"cuda_graphs is always, but decode cannot be captured: {'; '.join(reasons)}; accepted "
            "here: auto, never"
        )
    choice = _choose(needs, parallel)
    logger.warning("decode runs without CUDA graphs: %s", "; ".join(reasons))
    return choice, False


def _choose(needs: AttentionNeeds, parallel: ParallelSettings) -> AttentionChoice:
    try:
        return choose(needs, backend=parallel.attention_backend, exchange=parallel.exchange)
    except UnsupportedCombination as error:
        raise ConfigError(str(error)) from error
