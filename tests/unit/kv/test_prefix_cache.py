"""Prefix hits by content, in whole logical pages."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbraid.errors import OverloadedError
from kvbraid.kv.page_allocator import PageAllocator
from kvbraid.kv.prefix_cache import HASH_BLOCK_TOKENS, PrefixCache, block_hashes


def hashes_of(tokens: list[int], salt: str = "") -> list[bytes]:
    return block_hashes(tokens, model_digest="model", cache_salt=salt)


def cache_of(logical_page_size: int, num_pages: int = 64) -> PrefixCache:
    return PrefixCache(PageAllocator(num_pages), logical_page_size)


def remember(cache: PrefixCache, tokens: list[int], page_size: int) -> list[int]:
    """A sequence that was computed, cached and released."""
    pages = cache.allocate(-(-len(tokens) // page_size))
    cache.insert(hashes_of(tokens), pages, len(tokens))
    cache.release(pages)
    return pages


def test_hashes_name_whole_blocks_and_do_not_depend_on_what_follows() -> None:
    tokens = list(range(200))
    hashes = hashes_of(tokens)
    assert len(hashes) == 200 // HASH_BLOCK_TOKENS
    assert hashes_of(tokens[:128]) == hashes[:2]
    assert hashes_of([*tokens[:128], 7, 7]) == hashes[:2]


def test_hash_of_a_block_depends_on_every_token_before_it() -> None:
    tokens = list(range(192))
    for changed in (0, 63, 64, 127):
        other = tokens.copy()
        other[changed] += 1
        assert hashes_of(other)[2] != hashes_of(tokens)[2]


def test_model_and_salt_are_part_of_every_hash() -> None:
    tokens = list(range(64))
    names = {
        block_hashes(tokens, model_digest=model, cache_salt=salt)[0]
        for model, salt in [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]
    }
    assert len(names) == 4


def test_hash_chain_is_the_documented_one() -> None:
    """The coordinator and workers of other versions compute the same names."""
    root = hashlib.sha256((5).to_bytes(8, "little") + b"model" + b"salt").digest()
    block = b"".join(t.to_bytes(4, "little") for t in range(64))
    assert hashes_of(list(range(64)), "salt") == [hashlib.sha256(root + block).digest()]


def test_known_hashes_are_continued() -> None:
    tokens = list(range(300))
    known = hashes_of(tokens[:150])
    full = block_hashes(tokens, model_digest="model", cache_salt="", known=known)
    assert full == hashes_of(tokens)


def test_hit_never_exceeds_the_shared_prefix() -> None:
    """dcp.md bug 26296 (55): 150 shared tokens, P = 16, c = 2 -> hit 128."""
    cache = cache_of(16 * 2)
    shared = list(range(150))
    pages = remember(cache, shared + [1] * 106, 32)
    hit = cache.match(hashes_of(shared + [2] * 106), 255)
    assert hit == pages[:4]
    assert len(hit) * 32 == 128


def test_a_cached_page_is_a_logical_page() -> None:
    """dcp.md bug 56: with P = 16, c = 2 a page stands for 32 tokens, not 16."""
    cache = cache_of(16 * 2)
    tokens = list(range(128))
    pages = cache.allocate(4)
    assert cache.insert(hashes_of(tokens), pages, 128) == 4
    assert cache.peek(hashes_of(tokens), 128) == 128


@pytest.mark.parametrize("page_size", [8, 16, 48, 64, 96, 128, 512])
def test_page_sizes_share_the_same_hashes(page_size: int) -> None:
    tokens = list(range(1024))
    cache = cache_of(page_size, num_pages=200)
    pages = remember(cache, tokens, page_size)
    hit = cache.match(hashes_of([*tokens[:512], 9, 9]), 513)
    assert hit == pages[: 512 // page_size]


def test_last_token_is_left_to_compute() -> None:
    cache = cache_of(64)
    tokens = list(range(128))
    remember(cache, tokens, 64)
    assert len(cache.match(hashes_of(tokens), len(tokens) - 1)) == 1


def test_tokens_that_are_not_computed_are_not_found() -> None:
    cache = cache_of(64)
    tokens = list(range(256))
    pages = cache.allocate(4)
    cache.insert(hashes_of(tokens), pages, 130)
    assert cache.peek(hashes_of(tokens), 256) == 128


def test_content_computed_twice_is_cached_once() -> None:
    cache = cache_of(64)
    tokens = list(range(64))
    first, second = cache.allocate(1), cache.allocate(1)
    assert cache.insert(hashes_of(tokens), first, 64) == 1
    assert cache.insert(hashes_of(tokens), second, 64) == 0
    cache.release(second)
    cache.release(first)
    assert cache.counts() == (62, 0, 1)


def test_pages_in_use_are_never_evicted() -> None:
    cache = cache_of(64, num_pages=5)
    tokens = list(range(128))
    remember(cache, tokens, 64)
    held = cache.match(hashes_of(tokens), 127)
    other = cache.allocate(3)
    assert set(other).isdisjoint(held)
    with pytest.raises(OverloadedError, match="1 KV pages needed, 0 are free"):
        cache.allocate(1)
    cache.release(held)
    assert cache.allocate(1) == held


def test_least_recently_used_sequence_goes_first_and_its_tail_before_its_head() -> None:
    cache = cache_of(64, num_pages=7)
    old, new = [1] * 192, [2] * 192
    remember(cache, old, 64)
    remember(cache, new, 64)
    cache.release(cache.match(hashes_of(old), 192))
    cache.allocate(2)
    assert cache.peek(hashes_of(old), 192) == 192
    assert cache.peek(hashes_of(new), 192) == 64


def test_clear_keeps_pages_that_are_in_use() -> None:
    cache = cache_of(64, num_pages=5)
    tokens = list(range(128))
    remember(cache, tokens, 64)
    held = cache.match(hashes_of(tokens), 64)
    cache.clear()
    assert cache.counts() == (3, 1, 0)
    assert cache.match(hashes_of(tokens), 128) == []
    cache.release(held)
    assert cache.counts() == (4, 0, 0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([16, 32, 64, 96]))
def test_hits_hold_the_right_tokens_under_any_mix_of_requests(seed: int, page_size: int) -> None:
    """Model: what was last written to each page. A hit must read back the prompt's own tokens."""
    rng = random.Random(seed)
    cache = cache_of(page_size, num_pages=24)
    contents: dict[int, tuple[int, ...]] = {}
    running: list[list[int]] = []
    for _ in range(60):
        if running and rng.random() < 0.5:
            cache.release(running.pop(rng.randrange(len(running))))
            continue
        tokens = [rng.randrange(2) for _ in range(4)]
        prompt = [t for t in tokens for _ in range(rng.choice([64, 64, 50]))]
        hashes = hashes_of(prompt)
        pages = cache.match(hashes, len(prompt) - 1)
        for index, page in enumerate(pages):
            covered = prompt[: (index + 1) * page_size]
            assert contents[page] == tuple(covered)
            assert len(covered) == (index + 1) * page_size < len(prompt)
        try:
            fresh = cache.allocate(-(-len(prompt) // page_size) - len(pages))
        except OverloadedError:
            cache.release(pages)
            continue
        held = {page for sequence in running for page in sequence}
        assert held.isdisjoint(fresh)
        pages += fresh
        for index in range(len(pages) - len(fresh), len(pages)):
            contents[pages[index]] = tuple(prompt[: (index + 1) * page_size])
        cache.insert(hashes, pages, len(prompt))
        running.append(pages)
        assert sum(cache.counts()) == 23
    for pages in running:
        cache.release(pages)
    assert cache.counts().active == 0
    assert len(cache.allocate(23)) == 23


def test_forgotten_pages_are_not_found_and_freed_with_their_last_reference() -> None:
    cache = cache_of(64, num_pages=5)
    tokens = list(range(128))
    pages = remember(cache, tokens, 64)
    held = cache.match(hashes_of(tokens), 128)
    assert cache.forget(held) == set(pages)
    assert cache.peek(hashes_of(tokens), 128) == 0
    assert cache.counts() == (2, 2, 0)
    cache.release(held)
    assert cache.counts() == (4, 0, 0)


def test_what_begins_like_a_forgotten_prefix_is_forgotten_and_nothing_else() -> None:
    cache = cache_of(32)
    shared, other = [1] * 64, [5] * 128
    first, second = [*shared, *[2] * 64], [*shared, *[3] * 64]
    remember(cache, first, 32)
    remember(cache, second, 32)
    remember(cache, other, 32)
    held = cache.match(hashes_of(first), 64)
    fresh = cache.allocate(1)
    assert len(cache.forget([*held, *fresh])) == 2 + 2 + 2
    for prompt in (first, second):
        assert cache.peek(hashes_of(prompt), 128) == 0
    assert cache.peek(hashes_of(other), 128) == 128
    # Computed anew, the shared part is found again and leads to nothing that was there before.
    remember(cache, shared, 32)
    assert cache.peek(hashes_of(second), 128) == 64
    cache.release([*held, *fresh])
    assert sum(cache.counts()) == 63
    assert cache.counts().active == 0
