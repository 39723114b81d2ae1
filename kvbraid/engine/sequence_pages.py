"""Which pages a sequence holds: found and allocated on admission, grown, given back, remembered."""

from __future__ import annotations

from collections.abc import Iterable

from kvbraid.engine.sequence import EngineRequest, Sequence, Status
from kvbraid.kv.prefix_cache import HASH_BLOCK_TOKENS, PrefixCache, block_hashes


class SequencePages:
    """Gives pages of one pool to sequences and leaves trusted prefixes in the cache."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        logical_page_size: int,
        model_digest: str,
        keeps_prefixes: bool,
    ) -> None:
        self._cache = cache
        self._page_size = logical_page_size
        self._digest = model_digest
        self._keeps_prefixes = keeps_prefixes
        self._refused: tuple[Sequence, int] | None = None
        self.num_prefix_queried = 0
        self.num_prefix_hit = 0

    def hashes_of(self, request: EngineRequest) -> list[bytes]:
        """Names of the whole 64-token blocks of the request's tokens."""
        return block_hashes(
            request.token_ids, model_digest=self._digest, cache_salt=request.cache_salt
        )

    def take(self, sequence: Sequence, *, num_reserved: int) -> bool:
        """Pages for every known token, cached ones first.

        Returns False, and changes nothing, unless num_reserved pages stay available.
        """
        # Only pages that are released or cached make room. Until then the answer is the same, and
        # a long prompt at the head of the queue need not be looked up in every step.
        if self._refused == (sequence, self._cache.version):
            return False
        findable = len(sequence.token_ids) - (0 if sequence.awaits_rows else 1)
        held = self._cache.match(sequence.hashes, findable)
        missing = self._num_pages(len(sequence.token_ids)) - len(held)
        if self._cache.num_available < missing + num_reserved:
            self._cache.release(held)
            self._refused = (sequence, self._cache.version)
            return False
        sequence.pages = held + self._cache.allocate(missing)
        sequence.num_computed_tokens = len(held) * self._page_size
        self.num_prefix_queried += len(sequence.token_ids)
        self.num_prefix_hit += sequence.num_computed_tokens
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, findable)
        return True

    def grow(self, sequence: Sequence) -> list[int] | None:
        """The pages that a sequence needs more for its known tokens and its drafts; None when there
        is no room."""
        num_tokens = len(sequence.token_ids) + len(sequence.drafts)
        missing = self._num_pages(num_tokens) - len(sequence.pages)
        if missing <= 0:
            return []
        if missing > self._cache.num_available:
            return None
        pages = self._cache.allocate(missing)
        sequence.pages += pages
        return pages

    def remember(self, sequence: Sequence) -> None:
        """Let later requests find what the sequence has computed."""
        computed = sequence.num_computed_tokens
        if (
            not self._keeps_prefixes
            or not sequence.is_trusted
            or sequence.status is Status.RECEIVING
        ):
            return
        if computed // HASH_BLOCK_TOKENS > len(sequence.hashes):
            sequence.hashes = block_hashes(
                sequence.token_ids[:computed],
                model_digest=self._digest,
                cache_salt=sequence.request.cache_salt,
                known=sequence.hashes,
            )
        self._cache.insert(sequence.hashes, sequence.pages, computed)

    def distrust(self, sequence: Sequence, sharers: Iterable[Sequence]) -> None:
        """The logits of `sequence` were not finite: nobody is to find its KV, or KV made from it.

        sharers: sequences that may hold the same pages; they go on, but are not remembered.
        """
        sequence.is_trusted = False
        forgotten = self._cache.forget(sequence.pages)
        for sharer in sharers:
            if not forgotten.isdisjoint(sharer.pages):
                sharer.is_trusted = False

    def give_back(self, sequence: Sequence) -> None:
        """The sequence holds no page any more; what may be remembered is."""
        self.remember(sequence)
        self._cache.release(sequence.pages)
        sequence.pages = []
        sequence.is_trusted = True

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)
