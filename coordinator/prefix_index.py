"""Which worker has probably which prompt prefixes in its cache, by where they were sent."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from kvbraid.kv.prefix_cache import HASH_BLOCK_TOKENS


class PrefixIndex:
    """A bounded memory of 64-token blocks; the least recently sent go first. It may be wrong both
    ways, so it decides where a request goes and never what it computes."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._holders: OrderedDict[bytes, set[Hashable]] = OrderedDict()

    def num_cached_tokens(self, hashes: Sequence[bytes], holder: Hashable) -> int:
        """Leading tokens of a prompt with these block hashes that `holder` was sent before."""
        for index, block in enumerate(hashes):
            if holder not in self._holders.get(block, ()):
                return index * HASH_BLOCK_TOKENS
        return len(hashes) * HASH_BLOCK_TOKENS

    def note(self, hashes: Sequence[bytes], holder: Hashable) -> None:
        """`holder` gets a prompt with these block hashes."""
        for block in hashes:
            self._holders.setdefault(block, set()).add(holder)
            self._holders.move_to_end(block)
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)
