"""The cases for compute-sanitizer stand under the kernel that takes them on Hopper."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is absent", allow_module_level=True)

from attention.backends import decode_launch
from attention.backends.split_launch import SplitLaunch
from attention.backends.split_plan import WORKER_FIELDS
from attention.backends.triton_backend import TritonBackend
from attention.backends.triton_decode import TritonDecodeKernel
from tests.gpu import sanitized_kernels
from tests.gpu import test_triton_attention as decode

WAYS = {
    "_run_hopper": "split_mla",
    "_run_wide": "split_mla_wide",
    "_run_hopper_fp8": "split_mla_fp8",
    "_run_pairs": "split_fp8",
    "_run_portable": "split_attention",
}
NUM_SMS = 132


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, SplitLaunch]]:
    """Kernels that are taken as if this were an H200, instead of their launches."""
    found: list[tuple[str, SplitLaunch]] = []
    for way, kernel in WAYS.items():
        monkeypatch.setattr(
            SplitLaunch, way, lambda self, kernel=kernel: found.append((kernel, self))
        )
    monkeypatch.setattr(decode_launch, "is_hopper", lambda device: True)
    monkeypatch.setattr(decode_launch, "num_sms", lambda device: NUM_SMS)
    monkeypatch.setattr(decode_launch.triton_kernels, "HAS_GLUON", True)
    monkeypatch.setattr(TritonDecodeKernel, "mla", TritonDecodeKernel.mla_splits)
    monkeypatch.setattr(TritonDecodeKernel, "gqa", TritonDecodeKernel.gqa_splits)
    monkeypatch.setattr(decode, "DEVICE", torch.device("cpu"))
    return found


@pytest.mark.parametrize("kernel", WAYS.values())
def test_each_kernel_has_its_cases(kernel: str, launches: list[tuple[str, Any]]) -> None:
    for case in sanitized_kernels.DECODE[kernel]:
        decode.rank_result(case, decode.make_problem(case), 0, TritonBackend())
    assert {name for name, _ in launches} == {kernel}
    assert len(launches) == len(sanitized_kernels.DECODE[kernel])


@pytest.mark.parametrize("kernel", ["split_mla", "split_mla_wide", "split_mla_fp8"])
def test_a_program_goes_from_piece_to_piece(kernel: str, launches: list[tuple[str, Any]]) -> None:
    """What a warpgroup leaves in shared memory for the next piece is where races would be."""
    for case in sanitized_kernels.DECODE[kernel]:
        decode.rank_result(case, decode.make_problem(case), 0, TritonBackend())
    records = torch.cat([launch.plan.workers.view(-1, WORKER_FIELDS) for _, launch in launches])
    first_piece, end_piece, _, start, end = records[:, :5].T
    assert bool(((end_piece > first_piece + 1) & (end > start)).any())
