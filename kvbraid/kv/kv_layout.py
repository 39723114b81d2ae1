"""How a worker lays KV out over its ranks: what two workers compare before a handoff."""

from __future__ import annotations

from dataclasses import dataclass

from attention.layout import HeadLayout, StripeLayout
from kvbraid.errors import IncompatibleError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
KINDS = ("gqa", "mla")


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Model geometry and sharding of one worker's KV. Raises ValueError for impossible values.

    row_width: elements of one row of one head, 2 * head_dim for GQA (key, then value), latent +
    rope for MLA. dtype: storage type. model_digest: identity of the weights.
    """

    kind: str
    num_layers: int
    num_kv_heads: int
    num_q_heads: int
    row_width: int
    dtype: str
    tp_size: int
    dcp_size: int
    page_size: int
    interleave: int
    model_digest: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r} must be one of {KINDS}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} must be one of {tuple(DTYPE_BYTES)}")
        for name in ("num_layers", "num_kv_heads", "row_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be >= 1")
        if self.num_q_heads < self.num_kv_heads:
            raise ValueError(f"num_q_heads {self.num_q_heads} must be >= num_kv_heads")
        self.heads(0)
        self.stripe(0)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: one layer, one position, one head."""
        return self.row_width * DTYPE_BYTES[self.dtype]

    def heads(self, rank: int) -> HeadLayout:
        """Head sharding seen from tp rank `rank`."""
        return HeadLayout(self.num_q_heads, self.num_kv_heads, self.tp_size, rank, self.dcp_size)

    def stripe(self, rank: int) -> StripeLayout:
        """Striping seen from tp rank `rank`."""
        return StripeLayout(self.dcp_size, rank % self.dcp_size, self.page_size, self.interleave)


def ranks_heads(layout: KvLayout, rank: int) -> range:
    """Global KV heads that tp rank `rank` stores; may be empty."""
    return layout.heads(rank).group_kv_heads


def check_compatible(src: KvLayout, dst: KvLayout) -> None:
    """Raise IncompatibleError, naming every difference, unless rows of one can live in the other.

    Sharding, page size and interleave may differ; what a row is and whose weights made it may not.
    """
    names = (
        "kind",
        "num_layers",
        "num_kv_heads",
        "num_q_heads",
        "row_width",
        "dtype",
        "model_digest",
    )
    differences = [
        f"{name}: {getattr(src, name)!r} at the source, {getattr(dst, name)!r} at the destination"
        for name in names
        if getattr(src, name) != getattr(dst, name)
    ]
    if differences:
        raise IncompatibleError("KV layouts differ in " + "; ".join(differences))
