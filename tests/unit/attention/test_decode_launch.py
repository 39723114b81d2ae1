"""Which steps the Hopper kernels of MLA take: decided on any machine, as if it were an H200."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention.backends import decode_launch, triton_fp8_kernel
from attention.backends.decode_launch import DecodeLaunch, KeyForm
from attention.backends.triton_backend import TritonBackend
from attention.backends.triton_tuning import LaunchShape
from attention.interface import DecodeBatch, GQACache
from attention.layout import StripeLayout
from attention.rows import decode_rows

LATENTS = KeyForm(
    is_mla=True,
    dim=512,
    pe=64,
    dtype=torch.bfloat16,
    kv_dtype=torch.float8_e4m3fn,
    row_stride=576,
)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_launch, "is_hopper", lambda device: True)
    monkeypatch.setattr(decode_launch, "unpacks_fp8", lambda device: True)
    monkeypatch.setattr(decode_launch.triton_kernels, "HAS_GLUON", True)


def chosen(
    form: KeyForm, *, heads: int = 16, window: int = 1, page_size: int = 64, mask: str = "causal"
) -> LaunchShape:
    table = torch.arange(8, dtype=torch.int32)[None]
    batch = DecodeBatch(torch.tensor([100]), table, window, mask)
    rows = decode_rows(batch, StripeLayout(1, 0, page_size, 1))
    return DecodeLaunch(rows, (0,) * heads, torch.device("cpu")).shape(form)


@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("heads", [1, 5, 16, 40, 128])
def test_decode_over_fp8_latents_is_for_their_hopper_kernel(heads: int, page_size: int) -> None:
    assert chosen(LATENTS, heads=heads, page_size=page_size).gluon


@pytest.mark.parametrize(
    "step",
    [
        {"heads": 4, "window": 2},
        {"heads": 1, "window": 5, "mask": "full"},
        {"page_size": 32},
        {"page_size": 16},
    ],
    ids=str,
)
def test_windows_and_small_pages_are_not(step: dict[str, object]) -> None:
    assert not chosen(LATENTS, **step).gluon


@pytest.mark.parametrize(
    "changes",
    [
        {"row_stride": 1152},
        {"dim": 256, "row_stride": 320},
        {"dtype": torch.float32},
        {"is_mla": False},
    ],
    ids=str,
)
def test_rows_with_gaps_other_widths_and_types_are_not(changes: dict[str, object]) -> None:
    assert not chosen(replace(LATENTS, **changes)).gluon


@pytest.mark.parametrize(("heads", "window", "is_wide"), [(16, 4, False), (16, 8, True)])
def test_windows_over_16_bit_latents_have_hopper_kernels(
    heads: int, window: int, is_wide: bool
) -> None:
    shape = chosen(replace(LATENTS, kv_dtype=torch.bfloat16), heads=heads, window=window)
    assert (shape.gluon, shape.wide) == (True, is_wide)


def test_two_programs_an_sm_double_the_workers_of_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_launch, "num_sms", lambda device: 132)
    table = torch.arange(4096, dtype=torch.int32)[None]
    rows = decode_rows(DecodeBatch(torch.tensor([250_000]), table, 1), StripeLayout(1, 0, 64, 1))
    launch = DecodeLaunch(rows, (0,) * 16, torch.device("cpu"))
    assert launch.limits(launch.shape(LATENTS)).max_workers == 264


class _Recorder:
    """Stands in for a kernel."""

    def __init__(self) -> None:
        self.options: dict[str, object] = {}

    def __getitem__(self, grid: tuple[int, int]) -> _Recorder:
        return self

    def __call__(self, *arguments: object, **options: object) -> None:
        self.options = options


@pytest.mark.parametrize(("dim", "limit"), [(64, 168), (128, 128), (256, None)])
def test_the_limit_of_registers_reaches_the_launch(
    monkeypatch: pytest.MonkeyPatch, dim: int, limit: int | None
) -> None:
    kernel = _Recorder()
    monkeypatch.setattr(triton_fp8_kernel, "split_fp8", kernel)
    table = torch.arange(8, dtype=torch.int32)[None]
    rows = decode_rows(DecodeBatch(torch.tensor([100]), table, 1), StripeLayout(1, 0, 64, 1))
    pool, one = torch.zeros(8, 64, 1, dim).to(torch.float8_e4m3fn), torch.ones(1)
    backend = TritonBackend()
    step = backend.plan_decode(
        rows, kv_index=(0,) * 4, scale=1.0, value_width=dim, device=torch.device("cpu")
    )
    q = torch.zeros(1, 4, dim, dtype=torch.bfloat16)
    step.gqa_splits(q, GQACache(pool, pool, one, one), None, None)
    assert kernel.options["BLOCK_KEYS"] == 64
    assert kernel.options.get("maxnreg") == limit
