"""Keys of sampling noise."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvbraid.sampling_key import mix64, sampling_key


def test_mix64_is_the_splitmix64_finaliser() -> None:
    # First outputs of splitmix64 seeded with 1234567 (published test vector).
    golden = 0x9E3779B97F4A7C15
    outputs = [mix64(1234567 + step * golden) for step in range(1, 4)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_completions_and_seeds_get_distinct_keys() -> None:
    keys = {sampling_key(seed, index) for seed in range(500) for index in range(16)}
    assert len(keys) == 500 * 16
    assert all(0 <= key < 1 << 64 for key in keys)


def test_key_is_pinned_because_a_retry_may_run_another_version() -> None:
    assert sampling_key(0, 0) == 0xA706DD2F4D197E6F
    assert sampling_key((1 << 64) - 1, 15) == 0x2190E410D3980854


@pytest.mark.parametrize(("seed", "index"), [(-1, 0), (1 << 64, 0), (0, -1)])
def test_key_refuses_what_is_out_of_range(seed: int, index: int) -> None:
    with pytest.raises(ValueError, match=str(seed if index >= 0 else index)):
        sampling_key(seed, index)


def test_module_needs_no_torch() -> None:
    code = "import kvbraid.sampling_key, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
