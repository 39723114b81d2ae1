"""A drafter's own KV: paged, whole on one device (c = 1), read by the project's attention.

Rows are indexed from 0 in each sequence, whatever the absolute position of its first row is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.dcp import DcpAttention, DecodePlan
from attention.dispatch import AttentionChoice, AttentionNeeds, UnsupportedCombination, choose
from attention.interface import DecodeBatch, GQACache, LatentExpansion, MLACache
from attention.kv_rows import WritePlan
from attention.layout import HeadLayout, StripeLayout
from attention.single_group import SingleGroup
from kvbraid.errors import ConfigError
from kvbraid.kv.page_allocator import PageAllocator
from kvbraid.kv.page_pool import KvSpec, StripedPagePool
from kvbraid.kv.slots import LogicalSlots, slots_of_tokens
from kvbraid.speculative.draft_attention import attention_geometry
from kvbraid.speculative.drafter_config import DrafterConfig

Int64Array = NDArray[np.int64]

WINDOW_MASK = "full"


@dataclass(frozen=True, slots=True)
class DraftStep:
    """Attention of one forward. Implements `kvbraid.model.attention_port.LayerAttention`."""

    attention: DcpAttention
    pool: StripedPagePool
    write_plan: WritePlan
    plan: DecodePlan

    def gqa(self, layer: int, q: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See LayerAttention.gqa."""
        self.pool.write(layer, self.write_plan, key, value)
        cache = self.pool.layer(layer)
        assert isinstance(cache, GQACache)
        return self.attention.gqa_decode(q, cache, key, value, self.plan)

    def mla(
        self, layer: int, q_nope: Tensor, q_pe: Tensor, latent: Tensor, expansion: LatentExpansion
    ) -> Tensor:
        """See LayerAttention.mla; absorbed, with queries in latent space."""
        self.pool.write(layer, self.write_plan, latent)
        cache = self.pool.layer(layer)
        assert isinstance(cache, MLACache)
        # [T, H, dn] x [H, dn, R] -> [T, H, R]
        q_latent = torch.bmm(q_nope.transpose(0, 1), expansion.w_kc).transpose(0, 1)
        out = self.attention.mla_decode(q_latent, q_pe, cache, latent, self.plan)
        return torch.bmm(out.transpose(0, 1), expansion.w_vc).transpose(0, 1)


class DraftKv:
    """Pool, pages and attention of all sequences of one drafter. Used by one thread.

    spare_slot: one that no sequence has, behind those of all.
    """

    def __init__(
        self,
        config: DrafterConfig,
        *,
        window: int,
        num_kv_tokens: int,
        max_sequences: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        attention_for: Callable[[AttentionNeeds], AttentionChoice] = choose,
    ) -> None:
        """window: tokens a sequence that one forward runs, all of which see one another.
        attention_for: chooses a backend, or raises UnsupportedCombination.

        Raises ConfigError where sizes are impossible or no attention backend serves the drafter.
        """
        if num_kv_tokens < 1 or max_sequences < 1 or page_size < 1:
            raise ConfigError(
                f"num_kv_tokens {num_kv_tokens}, max_sequences {max_sequences} and page_size "
                f"{page_size} must be >= 1"
            )
        num_pages = 1 + -(-num_kv_tokens // page_size)
        self.page_size = page_size
        stripe = StripeLayout(1, 0, page_size)
        self.device = device
        self.window = window
        self.spare_slot = max_sequences
        self._page_size = page_size
        self.attention = _attention(
            config, stripe, window, max_sequences, dtype, device, attention_for
        )
        self.pool = StripedPagePool(_spec(config, dtype), num_pages, stripe, device)
        self._allocator = PageAllocator(num_pages)
        # Rows are as long as the pool; what no sequence has used is never touched.
        self._page_table = np.zeros((max_sequences, num_pages), dtype=np.int32)
        self._num_pages = np.zeros(max_sequences, dtype=np.int64)

    @property
    def num_free_pages(self) -> int:
        """Pages that `resize` can still take."""
        return self._allocator.num_free

    def num_pages(self, slot: int) -> int:
        """Pages of the sequence in `slot`."""
        return int(self._num_pages[slot])

    def missing_pages(self, slot: int, num_rows: int) -> int:
        """Free pages that `resize` would take; 0 or less when it takes none."""
        return -(-num_rows // self._page_size) - self.num_pages(slot)

    def resize(self, slot: int, num_rows: int) -> None:
        """Give the sequence in `slot` pages for exactly num_rows rows; kept rows keep their place.

        Raises OverloadedError, and changes nothing, when too few are free.
        """
        held = self.num_pages(slot)
        missing = self.missing_pages(slot, num_rows)
        if missing > 0:
            self._page_table[slot, held : held + missing] = self._allocator.allocate(missing)
        elif missing < 0:
            self._allocator.release(self._page_table[slot, held + missing : held].tolist())
        self._num_pages[slot] = held + missing

    def logical_slots(self, slots: Int64Array, indices: Int64Array) -> LogicalSlots:
        """Of row indices[t] of the sequence in slots[t]; both [T]."""
        return slots_of_tokens(self._page_table, slots, indices, self._page_size)

    def write_plan(
        self, slots: Int64Array, indices: Int64Array, into: WritePlan | None = None
    ) -> WritePlan:
        """Plan of writing row indices[t] of the sequence in slots[t]; both [T]. into: as in
        StripedPagePool.write_plan."""
        return self.pool.write_plan(self.logical_slots(slots, indices), into)

    def decode_batch(
        self, slots: Int64Array, lengths: Int64Array, max_growth: int = 0
    ) -> DecodeBatch:
        """The last `window` of lengths[b] rows of the sequence in slots[b]. max_growth: rows by
        which the page table reaches further."""
        num_pages = -(-(int(lengths.max()) + max_growth) // self._page_size)
        return DecodeBatch(
            seq_lens=torch.from_numpy(lengths.astype(np.int32)),
            page_table=torch.from_numpy(self._page_table[slots, :num_pages]),
            window=self.window,
            window_mask=WINDOW_MASK,
        )

    def plan_step(self, slots: Int64Array, lengths: Int64Array) -> DraftStep:
        """One forward of the last `window` of lengths[b] rows of the sequence in slots[b]."""
        window = self.window
        indices = lengths[:, None] - window + np.arange(window)
        return DraftStep(
            self.attention,
            self.pool,
            self.write_plan(np.repeat(slots, window), indices.ravel()),
            self.attention.plan_decode(self.decode_batch(slots, lengths), self.device),
        )


def _spec(config: DrafterConfig, dtype: torch.dtype) -> KvSpec:
    if config.mla is not None:
        return KvSpec("mla", config.num_layers, 1, config.mla.latent_width, 0, dtype)
    dim = config.head_dim
    return KvSpec("gqa", config.num_layers, config.num_kv_heads, dim, dim, dtype)


def _attention(
    config: DrafterConfig,
    stripe: StripeLayout,
    window: int,
    max_sequences: int,
    dtype: torch.dtype,
    device: torch.device,
    attention_for: Callable[[AttentionNeeds], AttentionChoice],
) -> DcpAttention:
    geometry = attention_geometry(config)
    num_kv_heads = 1 if config.mla is not None else config.num_kv_heads
    needs = AttentionNeeds(
        geometry=geometry,
        num_q_heads=config.num_q_heads,
        num_kv_heads=num_kv_heads,
        page_size=stripe.page_size,
        device=device.type,
        dtype=dtype,
        kv_dtype=dtype,
        operations=frozenset({"verify" if window > 1 else "decode"}),
        window_mask=WINDOW_MASK,
        max_batch_size=max_sequences,
    )
    try:
        choice = attention_for(needs)
    except UnsupportedCombination as error:
        raise ConfigError(f"{config.dialect} drafter: {error}") from error
    return DcpAttention(
        geometry=geometry,
        stripe=stripe,
        heads=HeadLayout(config.num_q_heads, num_kv_heads, 1, 0, 1),
        group=SingleGroup(),
        backend=choice.backend,
        exchange=choice.exchange,
        q_mode="gather",
    )
