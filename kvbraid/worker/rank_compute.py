"""Where and with what a rank computes: its device, dtype, CPU threads and communicator."""

from __future__ import annotations

import os

import torch

from kvbraid.engine.ranks import RankContext
from kvbraid.settings import ModelSettings, ParallelSettings

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def compute_device(settings: ModelSettings, local_rank: int) -> torch.device:
    """The torch device of a rank: `auto` takes the local rank's GPU when there is one."""
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", local_rank) if name == "cuda" else torch.device(name)


def compute_dtype(settings: ModelSettings, device: torch.device) -> torch.dtype:
    """float32 on CPU, bfloat16 on GPUs, unless the settings say otherwise."""
    if settings.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[settings.dtype]


def communicator_kind(context: RankContext, parallel: ParallelSettings) -> str:
    """`auto` is nccl on GPUs, shared memory for CPU ranks of one host, gloo otherwise."""
    if parallel.communicator != "auto":
        return parallel.communicator
    if torch.cuda.is_available():
        return "nccl"
    return "shared_memory" if context.is_one_host else "gloo"


def num_compute_threads(
    parallel: ParallelSettings, local_world_size: int, device: torch.device
) -> int:
    """Share the host's cores among its ranks; more threads than cores only wait for each other.

    A rank on a GPU has nothing but small tensors on its host. Waking a team of threads for one of
    them, which torch does from 32768 numbers on, may take as long as dozens of decode steps.
    """
    if parallel.threads_per_rank:
        return parallel.threads_per_rank
    if device.type != "cpu":
        return 1
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)
