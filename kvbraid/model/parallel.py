"""How one rank's part of a model is cut out."""

from __future__ import annotations

from dataclasses import dataclass

from attention.interface import Group
from attention.layout import HeadLayout, shard_range
from kvbraid.errors import ConfigError

Q_MODES = ("gather", "replicate")


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """This rank's heads, its tensor-parallel group and how queries reach the DCP group.

    q_mode "gather": this rank projects its own query heads and the attention gathers them;
    "replicate": it projects the query heads of its whole DCP group.
    """

    heads: HeadLayout
    tp_group: Group
    q_mode: str = "gather"

    def __post_init__(self) -> None:
        if self.q_mode not in Q_MODES:
            raise ConfigError(f"q_mode {self.q_mode!r} must be one of {', '.join(Q_MODES)}")
        if (self.tp_group.rank, self.tp_group.size) != (self.heads.tp_rank, self.heads.tp_size):
            raise ConfigError(
                f"the group's rank {self.tp_group.rank} of {self.tp_group.size} is not the head "
                f"layout's {self.heads.tp_rank} of {self.heads.tp_size}"
            )

    @property
    def q_heads(self) -> range:
        """Global ids of the query heads that this rank projects."""
        heads = self.heads
        return heads.group_q_heads if self.q_mode == "replicate" else heads.local_q_heads

    def shard(self, size: int) -> range:
        """This rank's part of a dimension of `size`."""
        return shard_range(size, self.heads.tp_rank, self.heads.tp_size)

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank adds the biases of row-parallel projections."""
        return self.heads.tp_rank == 0
