"""The group of a single rank: what c = 1 and tp = 1 use."""

from __future__ import annotations

from torch import Tensor


class SingleGroup:
    """`attention.interface.Group` of one rank: no communication. Results never alias inputs,
    except where the protocol says that the input is returned."""

    rank = 0
    size = 1

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[1, *tensor.shape]."""
        return tensor.unsqueeze(0).clone()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """`tensor` as it is."""
        return tensor

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Entry 0 of `tensor` [1, ...]."""
        if tensor.shape[:1] != (1,):
            raise ValueError(f"shape {tuple(tensor.shape)} must begin with the size 1")
        return tensor[0].clone()

    def all_to_all(self, tensor: Tensor, send_splits: list[int], recv_splits: list[int]) -> Tensor:
        """`tensor`, copied."""
        if send_splits != [tensor.shape[0]] or recv_splits != send_splits:
            raise ValueError(f"splits {send_splits}, {recv_splits} must be [{tensor.shape[0]}]")
        return tensor.clone()

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """`tensor` as it is."""
        if source != 0:
            raise ValueError(f"source {source} is outside [0, 1)")
        return tensor

    def barrier(self) -> None:
        """Returns at once."""
