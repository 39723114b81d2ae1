"""Who uses which logical page: each is free, active (referenced) or cached (kept, unreferenced)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvbraid.errors import OverloadedError


class PageCounts(NamedTuple):
    """Pages by state; they add up to the pages that can be allocated."""

    free: int
    active: int
    cached: int


class PageAllocator:
    """Logical pages 1..num_pages-1 with reference counts; page 0 is the sink of padded writes.

    Not thread-safe: the engine thread alone uses it.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages {num_pages} must be >= 2: page 0 is never allocated")
        self._free = deque(range(1, num_pages))
        self._num_refs = [0] * num_pages
        self._kept: set[int] = set()
        self._idle_kept: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out now."""
        return len(self._free)

    def counts(self) -> PageCounts:
        """Pages by state."""
        cached = len(self._idle_kept)
        total = len(self._num_refs) - 1
        return PageCounts(len(self._free), total - len(self._free) - cached, cached)

    def num_refs(self, page: int) -> int:
        """References to `page`."""
        return self._num_refs[page]

    def allocate(self, num_pages: int) -> list[int]:
        """Free pages, each with one reference that the caller must release.

        Raises OverloadedError, and takes nothing, when fewer are free.
        """
        if num_pages < 0:
            raise ValueError(f"num_pages {num_pages} must be >= 0")
        if num_pages > len(self._free):
            raise OverloadedError(f"{num_pages} KV pages needed, {len(self._free)} are free")
        pages = [self._free.popleft() for _ in range(num_pages)]
        for page in pages:
            self._num_refs[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to each page. Raises ValueError for a free page."""
        for page in pages:
            self._check_live(page)
            self._num_refs[page] += 1
            self._idle_kept.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference of each page, in the order of the sequence.

        The last reference frees a page unless it is kept. Later pages become evictable before
        earlier ones, because a cached tail is useless without its head.
        Raises ValueError for a page that has no reference.
        """
        for page in reversed(pages):
            if not 0 < page < len(self._num_refs) or self._num_refs[page] == 0:
                raise ValueError(f"page {page} has no reference to release")
            self._num_refs[page] -= 1
            if self._num_refs[page] == 0:
                if page in self._kept:
                    self._idle_kept[page] = None
                else:
                    self._free.append(page)

    def keep(self, page: int) -> None:
        """Do not free `page` when its last reference goes. Raises ValueError for a free page."""
        self._check_live(page)
        self._kept.add(page)

    def drop(self, page: int) -> None:
        """Undo `keep`; frees the page when nothing references it."""
        self._kept.discard(page)
        if page in self._idle_kept:
            del self._idle_kept[page]
            self._free.append(page)

    def oldest_idle(self) -> int | None:
        """The kept page that has been without references for longest; None when there is none."""
        return next(iter(self._idle_kept), None)

    def _check_live(self, page: int) -> None:
        if not 0 < page < len(self._num_refs):
            raise ValueError(f"page {page} is outside [1, {len(self._num_refs)})")
        if self._num_refs[page] == 0 and page not in self._idle_kept:
            raise ValueError(f"page {page} is free")
