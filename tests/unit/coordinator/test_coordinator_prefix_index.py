"""The memory of where prefixes went."""

from __future__ import annotations

from coordinator.prefix_index import PrefixIndex
from kvbraid.kv.prefix_cache import block_hashes


def hashes(length: int, first: int = 0) -> list[bytes]:
    return block_hashes(range(first, first + length), model_digest="d", cache_salt="")


def test_leading_blocks_are_found_per_holder() -> None:
    index = PrefixIndex(100)
    index.note(hashes(200), "a")
    assert index.num_cached_tokens(hashes(300), "a") == 192
    assert index.num_cached_tokens(hashes(128), "a") == 128
    assert index.num_cached_tokens(hashes(300), "b") == 0
    assert index.num_cached_tokens(hashes(300, first=1), "a") == 0
    index.note(hashes(64), "b")
    assert index.num_cached_tokens(hashes(300), "b") == 64


def test_the_least_recent_blocks_are_forgotten() -> None:
    index = PrefixIndex(4)
    index.note(hashes(128), "a")
    index.note(hashes(128, first=1000), "a")
    index.note(hashes(128), "a")
    index.note(hashes(128, first=2000), "a")
    assert index.num_cached_tokens(hashes(128), "a") == 128
    assert index.num_cached_tokens(hashes(128, first=1000), "a") == 0


def test_no_memory_at_all_is_allowed() -> None:
    index = PrefixIndex(0)
    index.note(hashes(128), "a")
    assert index.num_cached_tokens(hashes(128), "a") == 0
