"""Launch shapes of the triton kernels, from measurements on H200."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchShape:
    """How the split kernel is launched.

    gluon: the Hopper kernel of gluon_mla_kernel, or over 8-bit pools of gluon_mla_fp8_kernel,
        instead of the portable one; tiles of 64 keys.
    wide: with gluon, that of gluon_mla_wide_kernel: block_rows 64, 4 warps, and 4 that it adds.
    product_first: with gluon, start a tile's first product before the next tile's copy: better
        where products and not memory are waited for.
    swap: computes scores as keys x rows, so that few rows still fill a tensor core instruction.
    block_rows: rows (query of the window, query head) of a program.
    block_keys: keys of a tile. num_warps, num_stages: as in Triton.
    programs_per_sm: programs that share an SM; the plan deals the keys to that many.
    min_blocks: fewest blocks of 64 keys for which a program is worth starting.
    max_registers: of a thread of a portable kernel, so that programs_per_sm find room.
    rounds_partials: partial results are written in the dtype of q and not in float32. For 64 rows
        over 132 programs they are 17 MB in float32, a ninth of the bytes of 128K latents, written
        once and read once; rounding them adds about as much error as rounding the result does.
    """

    swap: bool
    block_rows: int
    num_warps: int
    block_keys: int = 64
    num_stages: int = 2
    gluon: bool = False
    wide: bool = False
    product_first: bool = False
    programs_per_sm: int = 1
    min_blocks: int = 1
    max_registers: int | None = None
    rounds_partials: bool = False


def launch_shape(
    *,
    is_mla: bool,
    rows: int,
    keys: int,
    window: int,
    dim: int,
    itemsize: int,
    has_gluon: bool,
    has_wide: bool,
) -> LaunchShape:
    """The shape for `rows` rows a KV head, value width `dim` and KV elements of `itemsize` bytes.

    keys: of all sequences of the batch together. window: queries of each. has_gluon, has_wide:
    whether gluon_mla_kernel (gluon_mla_fp8_kernel where itemsize is 1) and gluon_mla_wide_kernel
    can serve the call.
    """
    if itemsize > 2:
        return LaunchShape(swap=False, block_rows=16, block_keys=16, num_warps=4)
    if itemsize == 1:
        return _gluon_fp8_shape(rows, keys) if has_gluon else _fp8_shape(rows, dim)
    if not is_mla:
        return _gqa_shape(rows, dim)
    if not has_gluon:
        return _mla_shape(rows)
    return _gluon_shape(rows, keys, window=window, has_wide=has_wide)


# What the shapes below need in shared memory, and what they need in three stages: as Triton 3.9
# compiles them, 113 KiB (8-bit latents, 32 rows) and 76 KiB on NVIDIA, 108 and 72 KiB on AMD.
_SHARED_MEMORY = 120 << 10
_SHARED_MEMORY_OF_FEW_STAGES = 96 << 10


def fitted(shape: LaunchShape, shared_memory: int) -> LaunchShape:
    """`shape` for a GPU whose programs have so many bytes of shared memory: fewer stages where it
    has 99 KiB (sm86, sm89, sm120), few rows too where it has 64 (AMD before gfx950). Not measured.
    """
    if shared_memory >= _SHARED_MEMORY:
        return shape
    fewer = replace(shape, num_stages=min(3, shape.num_stages))
    if shared_memory >= _SHARED_MEMORY_OF_FEW_STAGES:
        return fewer
    return replace(fewer, block_rows=16)


# Below this a block of 64 rows has so few tiles a program that the one more of a verify window
# counts: two warpgroups that share each tile are better then than two that take turns, 55 against
# 57 us for four queries of 16 heads and 128K keys. For one query of 64 heads it is 57 against 55.
_MANY_KEYS = 256 << 10


def _gluon_shape(rows: int, keys: int, *, window: int, has_wide: bool) -> LaunchShape:
    # A second block of keys costs less than one more partial result where rows are many.
    if rows <= 16:
        return LaunchShape(gluon=True, swap=True, block_rows=16, num_warps=4)
    if rows <= 32:
        return LaunchShape(gluon=True, swap=True, block_rows=32, num_warps=4, min_blocks=2)
    if has_wide and (rows > 64 or keys >= _MANY_KEYS or window == 1):
        return LaunchShape(
            gluon=True,
            wide=True,
            swap=False,
            block_rows=64,
            num_warps=4,
            min_blocks=4,
            rounds_partials=True,
        )
    # Short pieces and a single block of rows wait for memory.
    return LaunchShape(
        gluon=True,
        product_first=rows > 64 or keys >= _MANY_KEYS,
        swap=False,
        block_rows=64,
        num_warps=8,
        min_blocks=4,
        rounds_partials=True,
    )


def _mla_shape(rows: int) -> LaunchShape:
    if rows <= 16:
        return LaunchShape(swap=False, block_rows=16, block_keys=32, num_warps=4, num_stages=5)
    return LaunchShape(swap=False, block_rows=32, block_keys=32, num_warps=8)


def _gqa_shape(rows: int, dim: int) -> LaunchShape:
    if rows > 16:
        return LaunchShape(
            swap=False,
            block_rows=32 if rows <= 32 else 64,
            block_keys=64 if dim <= 128 else 32,
            num_warps=4,
            num_stages=3,
            programs_per_sm=2,
        )
    if dim > 128:
        return LaunchShape(
            swap=False, block_rows=16, block_keys=32, num_warps=4, num_stages=3, programs_per_sm=2
        )
    if dim > 64:
        return LaunchShape(
            swap=False, block_rows=16, block_keys=64, num_warps=4, num_stages=5, programs_per_sm=2
        )
    return LaunchShape(
        swap=False, block_rows=16, block_keys=32, num_warps=2, num_stages=6, programs_per_sm=6
    )


# An 8-bit pool with float32 products: converted tiles of a pipeline do not fit in registers.
FP8_IN_FLOAT32 = LaunchShape(swap=False, block_rows=16, block_keys=16, num_warps=4, num_stages=1)


# Up to so many keys, once for each block of rows, a second program an SM costs gluon_mla_fp8_kernel
# more, as its partial results are merged, than it gains while the first one waits: 39 against 36 us
# for one sequence of 128K, but 89 against 137 for 64 of 8K.
_FEW_KEYS = 160 << 10


def _gluon_fp8_shape(rows: int, keys: int) -> LaunchShape:
    if keys * -(-rows // 16) <= _FEW_KEYS:
        return LaunchShape(gluon=True, swap=True, block_rows=16, num_warps=4, min_blocks=2)
    # One program waits for memory while the other computes.
    return LaunchShape(
        gluon=True,
        swap=True,
        block_rows=16,
        num_warps=4,
        programs_per_sm=2,
        min_blocks=2,
        rounds_partials=True,
    )


def _fp8_shape(rows: int, dim: int) -> LaunchShape:
    """Of triton_fp8_kernel, for one scale a tensor as well as one a token."""
    block_rows = 16 if rows <= 16 else 32
    if dim > 256:
        return LaunchShape(
            swap=False,
            block_rows=block_rows,
            num_warps=4 if rows <= 16 else 8,
            num_stages=5,
            programs_per_sm=2 if rows <= 16 else 1,
        )
    if dim > 128 or rows > 16:
        return LaunchShape(
            swap=False, block_rows=block_rows, num_warps=4, num_stages=5, programs_per_sm=2
        )
    if dim > 64:
        # Left alone, the compiler takes too many registers for four programs; and for six below.
        return LaunchShape(
            swap=False,
            block_rows=16,
            num_warps=4,
            num_stages=5,
            programs_per_sm=4,
            max_registers=128,
        )
    return LaunchShape(
        swap=False,
        block_rows=16,
        num_warps=2,
        num_stages=5,
        programs_per_sm=6,
        max_registers=168,
    )
