"""Reference counts of logical pages."""

from __future__ import annotations

import pytest

from kvbraid.errors import OverloadedError
from kvbraid.kv.page_allocator import PageAllocator


def test_page_zero_is_never_handed_out() -> None:
    allocator = PageAllocator(4)
    assert sorted(allocator.allocate(3)) == [1, 2, 3]
    assert allocator.counts() == (0, 3, 0)


def test_allocation_that_does_not_fit_takes_nothing() -> None:
    allocator = PageAllocator(4)
    with pytest.raises(OverloadedError, match="4 KV pages needed, 3 are free"):
        allocator.allocate(4)
    assert allocator.num_free == 3


def test_shared_page_is_freed_by_its_last_reference_only() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.retain(pages[:1])
    allocator.release(pages)
    assert allocator.counts() == (2, 1, 0)
    allocator.release(pages[:1])
    assert allocator.counts() == (3, 0, 0)


def test_kept_page_outlives_its_references_until_it_is_dropped() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(1)
    allocator.keep(pages[0])
    allocator.release(pages)
    assert allocator.counts() == (2, 0, 1)
    allocator.retain(pages)
    assert allocator.counts() == (2, 1, 0)
    allocator.release(pages)
    allocator.drop(pages[0])
    assert allocator.counts() == (3, 0, 0)


def test_dropping_a_referenced_page_frees_it_on_release() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(1)
    allocator.keep(pages[0])
    allocator.drop(pages[0])
    assert allocator.num_free == 2
    allocator.release(pages)
    assert allocator.num_free == 3


def test_tail_of_a_released_sequence_is_the_oldest() -> None:
    allocator = PageAllocator(5)
    pages = allocator.allocate(3)
    for page in pages:
        allocator.keep(page)
    allocator.release(pages)
    assert allocator.oldest_idle() == pages[-1]


@pytest.mark.parametrize("page", [0, 1, 4, -1])
def test_double_free_and_foreign_pages_are_refused(page: int) -> None:
    allocator = PageAllocator(4)
    with pytest.raises(ValueError, match="no reference"):
        allocator.release([page])
    with pytest.raises(ValueError, match=r"free|outside"):
        allocator.retain([page])
    with pytest.raises(ValueError, match=r"free|outside"):
        allocator.keep(page)


def test_pool_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="num_pages 1 must be >= 2"):
        PageAllocator(1)
