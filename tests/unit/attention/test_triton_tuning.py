"""Which kernel a launch shape names, by rows and by what can serve the call."""

from __future__ import annotations

import pytest

from attention.backends.triton_tuning import LaunchShape, launch_shape


def mla_shape(
    rows: int, *, keys: int = 1 << 20, has_gluon: bool = True, has_wide: bool = True
) -> LaunchShape:
    return launch_shape(
        is_mla=True,
        rows=rows,
        keys=keys,
        dim=512,
        itemsize=2,
        has_gluon=has_gluon,
        has_wide=has_wide,
    )


@pytest.mark.parametrize("rows", [33, 64, 65, 128, 1024])
def test_many_rows_go_to_the_wide_kernel_in_the_only_shape_that_it_has(rows: int) -> None:
    shape = mla_shape(rows)
    assert (shape.gluon, shape.wide, shape.block_rows, shape.num_warps) == (True, True, 64, 4)


@pytest.mark.parametrize(("rows", "is_wide"), [(64, False), (65, True)])
def test_one_block_of_rows_needs_many_keys_for_two_warpgroups(rows: int, is_wide: bool) -> None:
    assert mla_shape(rows, keys=128 << 10).wide is is_wide


@pytest.mark.parametrize("rows", [1, 16, 17, 32])
def test_few_rows_keep_the_kernel_that_swaps_keys_and_rows(rows: int) -> None:
    shape = mla_shape(rows)
    assert (shape.gluon, shape.wide, shape.swap) == (True, False, True)


def test_what_the_wide_kernel_cannot_serve_goes_to_the_other_hopper_kernel() -> None:
    shape = mla_shape(64, has_wide=False)
    assert (shape.gluon, shape.wide, shape.num_warps) == (True, False, 8)


def test_without_hopper_kernels_the_portable_one_serves() -> None:
    shape = mla_shape(64, has_gluon=False, has_wide=False)
    assert (shape.gluon, shape.wide) == (False, False)
