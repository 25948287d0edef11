import pytest

from tandem.engine.kvcache.allocator import PageAllocator


def test_pages_are_allocated_once_and_freed() -> None:
    allocator = PageAllocator(4)
    taken = allocator.allocate(3)
    assert sorted(taken + allocator.free_pages()) == [0, 1, 2, 3] and allocator.num_free == 1
    allocator.free(taken[:2])
    # The last freed page is likely still in a CPU cache.
    assert allocator.allocate(1) == [taken[1]]
    assert allocator.allocate(0) == [] and allocator.num_free == 2


def test_freeing_a_free_page_fails_at_once() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(pages[:1])
