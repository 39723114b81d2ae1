"""How many CPU threads a rank computes with."""

from __future__ import annotations

import os

import pytest
import torch

from kvbraid.settings import ParallelSettings
from kvbraid.worker.rank_compute import num_compute_threads

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("threads_per_rank", "local_ranks", "device", "num_threads"),
    [
        (0, 1, CPU, 8),
        (0, 3, CPU, 2),
        (0, 16, CPU, 1),
        (5, 3, CPU, 5),
        (0, 1, GPU, 1),
        (0, 16, GPU, 1),
        (3, 1, GPU, 3),
    ],
)
def test_ranks_share_the_cores_and_those_on_gpus_take_one(
    threads_per_rank: int,
    local_ranks: int,
    device: torch.device,
    num_threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    settings = ParallelSettings(threads_per_rank=threads_per_rank)
    assert num_compute_threads(settings, local_ranks, device) == num_threads
