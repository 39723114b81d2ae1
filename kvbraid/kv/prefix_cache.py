"""Which prompts' KV is in the pool already.

Blocks of 64 tokens are hashed in a chain, with the model and the cache namespace mixed in, so
every worker and the coordinator name the same blocks whatever their page size and dcp size.
Each worker then speaks of its own whole logical pages: the key of page i is the hash of the
block that contains the page's last token, and i.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvbraid.kv.page_allocator import PageAllocator, PageCounts

HASH_BLOCK_TOKENS = 64


def block_hashes(
    token_ids: Sequence[int],
    *,
    model_digest: str,
    cache_salt: str,
    known: Sequence[bytes] = (),
) -> list[bytes]:
    """Chained hash of every whole 64-token block of `token_ids`, 32 bytes each.

    known: hashes of the first blocks, when the caller has them from an earlier call with the
    same digest and salt; they are taken over.
    """
    num_blocks = len(token_ids) // HASH_BLOCK_TOKENS
    hashes = list(known[:num_blocks])
    parent = hashes[-1] if hashes else _namespace(model_digest, cache_salt)
    first = len(hashes) * HASH_BLOCK_TOKENS
    tokens = np.asarray(token_ids[first : num_blocks * HASH_BLOCK_TOKENS], dtype="<u4")
    for block in tokens.reshape(-1, HASH_BLOCK_TOKENS):
        parent = hashlib.sha256(parent + block.tobytes()).digest()
        hashes.append(parent)
    return hashes


def _namespace(model_digest: str, cache_salt: str) -> bytes:
    digest = model_digest.encode()
    # The length keeps ("ab", "c") and ("a", "bc") apart.
    return hashlib.sha256(len(digest).to_bytes(8, "little") + digest + cache_salt.encode()).digest()


class _PageKey(NamedTuple):
    block_hash: bytes
    page_index: int


class PrefixCache:
    """Finished pages by content, in front of the allocator. Least recently used pages go first;
    a page that any sequence references is never evicted.

    Not thread-safe: the engine thread alone uses it.
    """

    def __init__(self, allocator: PageAllocator, logical_page_size: int) -> None:
        if logical_page_size < 1:
            raise ValueError(f"logical_page_size {logical_page_size} must be >= 1")
        self._allocator = allocator
        self._page_size = logical_page_size
        self._pages: dict[_PageKey, int] = {}
        self._keys: dict[int, _PageKey] = {}
        # The first page of the prefix that each cached page ends.
        self._roots: dict[int, _PageKey] = {}
        self._version = 0
        self.num_evicted_pages = 0

    @property
    def version(self) -> int:
        """Grows when pages are released or cached: what did not fit before may fit now."""
        return self._version

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out, by eviction if need be."""
        counts = self._allocator.counts()
        return counts.free + counts.cached

    def counts(self) -> PageCounts:
        """Pages by state."""
        return self._allocator.counts()

    def match(self, hashes: Sequence[bytes], num_tokens: int) -> list[int]:
        """Pages that hold the longest cached prefix of at most `num_tokens` tokens.

        Each comes with a reference that the caller must `release`. Pass the prompt's length - 1:
        at least one token must be computed to get logits.
        """
        pages: list[int] = []
        for key in self._keys_of(hashes, num_tokens):
            page = self._pages.get(key)
            if page is None:
                break
            pages.append(page)
        self._allocator.retain(pages)
        return pages

    def peek(self, hashes: Sequence[bytes], num_tokens: int) -> int:
        """Tokens that `match` would find; references nothing."""
        num_pages = 0
        for key in self._keys_of(hashes, num_tokens):
            if key not in self._pages:
                break
            num_pages += 1
        return num_pages * self._page_size

    def insert(self, hashes: Sequence[bytes], pages: Sequence[int], num_tokens: int) -> int:
        """Make a sequence's first `num_tokens` tokens findable; returns the pages newly cached.

        hashes: `block_hashes` of the sequence; pages: its logical pages. The KV of those tokens
        must be in the pool already. A content that is cached in another page stays there.
        """
        num_new = 0
        keys = self._keys_of(hashes, num_tokens)
        for key, page in zip(keys, pages, strict=False):
            if key in self._pages or page in self._keys:
                continue
            self._allocator.keep(page)
            self._pages[key] = page
            self._keys[page] = key
            self._roots[page] = keys[0]
            num_new += 1
        self._version += num_new
        return num_new

    def allocate(self, num_pages: int) -> list[int]:
        """Pages with one reference each, evicting unreferenced ones when too few are free.

        Raises OverloadedError, and evicts nothing, when even that is not enough.
        """
        if num_pages <= self.num_available:
            while self._allocator.num_free < num_pages:
                self._evict_one()
        return self._allocator.allocate(num_pages)

    def release(self, pages: Sequence[int]) -> None:
        """Give a sequence's references back; its cached pages stay findable until evicted."""
        self._allocator.release(pages)
        self._version += 1

    def forget(self, pages: Iterable[int]) -> frozenset[int]:
        """Make the content of `pages` impossible to find, because it is not to be trusted.

        Whatever begins with the same first page may have been computed from it and is forgotten
        too. Forgotten pages are freed when their last reference goes. Returns all of them; pages
        that are not cached are ignored.
        """
        roots = {self._roots[page] for page in pages if page in self._roots}
        doomed = frozenset(page for page, root in self._roots.items() if root in roots)
        for page in doomed:
            self._forget(page)
        return doomed

    def clear(self) -> None:
        """Forget every page; those that sequences reference are freed on their release."""
        for page in list(self._keys):
            self._forget(page)

    def _keys_of(self, hashes: Sequence[bytes], num_tokens: int) -> list[_PageKey]:
        known = min(num_tokens, len(hashes) * HASH_BLOCK_TOKENS)
        return [
            _PageKey(hashes[((i + 1) * self._page_size - 1) // HASH_BLOCK_TOKENS], i)
            for i in range(max(0, known) // self._page_size)
        ]

    def _evict_one(self) -> None:
        page = self._allocator.oldest_idle()
        if page is None:
            raise RuntimeError("no page to evict although the counts promised one")
        self.num_evicted_pages += 1
        self._forget(page)

    def _forget(self, page: int) -> None:
        del self._pages[self._keys.pop(page)]
        del self._roots[page]
        self._allocator.drop(page)
