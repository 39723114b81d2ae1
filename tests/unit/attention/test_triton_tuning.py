"""Which kernel a launch shape names, by rows and by what can serve the call."""

from __future__ import annotations

import pytest

from attention.backends.triton_tuning import LaunchShape, launch_shape


def mla_shape(
    rows: int,
    *,
    keys: int = 1 << 20,
    window: int = 1,
    itemsize: int = 2,
    has_gluon: bool = True,
    has_wide: bool = True,
) -> LaunchShape:
    return launch_shape(
        is_mla=True,
        rows=rows,
        keys=keys,
        window=window,
        dim=512,
        itemsize=itemsize,
        has_gluon=has_gluon,
        has_wide=has_wide,
    )


@pytest.mark.parametrize("rows", [33, 64, 65, 128, 1024])
def test_many_rows_go_to_the_wide_kernel_in_the_only_shape_that_it_has(rows: int) -> None:
    shape = mla_shape(rows)
    assert (shape.gluon, shape.wide, shape.block_rows, shape.num_warps) == (True, True, 64, 4)


@pytest.mark.parametrize(
    ("rows", "keys", "window", "is_wide"),
    [
        (64, 128 << 10, 4, False),
        (65, 128 << 10, 5, True),
        (64, 256 << 10, 4, True),
        (64, 128 << 10, 1, True),
    ],
)
def test_one_block_of_rows_with_a_window_needs_many_keys_for_two_warpgroups(
    rows: int, keys: int, window: int, is_wide: bool
) -> None:
    assert mla_shape(rows, keys=keys, window=window).wide is is_wide


@pytest.mark.parametrize("rows", [1, 16, 17, 32])
def test_few_rows_keep_the_kernel_that_swaps_keys_and_rows(rows: int) -> None:
    shape = mla_shape(rows)
    assert (shape.gluon, shape.wide, shape.swap) == (True, False, True)


def test_what_the_wide_kernel_cannot_serve_goes_to_the_other_hopper_kernel() -> None:
    shape = mla_shape(64, has_wide=False)
    assert (shape.gluon, shape.wide, shape.num_warps) == (True, False, 8)


@pytest.mark.parametrize(
    ("rows", "has_gluon", "is_gluon"),
    [(1, True, True), (16, True, True), (128, True, True), (16, False, False)],
)
def test_rows_over_fp8_latents_go_to_the_hopper_kernel_for_them(
    rows: int, has_gluon: bool, is_gluon: bool
) -> None:
    shape = mla_shape(rows, itemsize=1, has_gluon=has_gluon, has_wide=False)
    assert (shape.gluon, shape.wide) == (is_gluon, False)
    if is_gluon:
        assert (shape.block_rows, shape.num_warps) == (16, 4)


@pytest.mark.parametrize(
    ("rows", "keys", "programs_per_sm", "rounds_partials"),
    [
        (16, 0, 1, False),
        (16, 128 << 10, 1, False),
        (16, 512 << 10, 2, True),
        (16, 1 << 20, 2, True),
        (32, 64 << 10, 1, False),
        (32, 128 << 10, 2, True),
    ],
)
def test_few_keys_in_fp8_latents_have_one_program_an_sm_and_fewer_partial_results(
    rows: int, keys: int, programs_per_sm: int, rounds_partials: bool
) -> None:
    shape = mla_shape(rows, keys=keys, itemsize=1)
    assert (shape.programs_per_sm, shape.rounds_partials) == (programs_per_sm, rounds_partials)


@pytest.mark.parametrize(
    ("dim", "programs_per_sm", "max_registers"), [(64, 6, 168), (128, 4, 128), (256, 2, None)]
)
def test_programs_over_fp8_keys_of_kv_heads_fit_the_registers_of_an_sm(
    dim: int, programs_per_sm: int, max_registers: int | None
) -> None:
    shape = launch_shape(
        is_mla=False,
        rows=4,
        keys=1 << 20,
        window=1,
        dim=dim,
        itemsize=1,
        has_gluon=False,
        has_wide=False,
    )
    assert (shape.programs_per_sm, shape.max_registers) == (programs_per_sm, max_registers)
    if shape.max_registers is not None:
        # An SM of Hopper has 64 K registers.
        assert programs_per_sm * shape.num_warps * 32 * shape.max_registers <= 64 << 10


def test_without_hopper_kernels_the_portable_one_serves() -> None:
    shape = mla_shape(64, has_gluon=False, has_wide=False)
    assert (shape.gluon, shape.wide) == (False, False)
