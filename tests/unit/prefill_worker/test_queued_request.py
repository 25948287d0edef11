"""Pages that other jobs are computing for a request."""

from tandem.prefill_worker.queued_request import PagesInWork


def test_pages_are_in_work_until_every_job_has_computed_them() -> None:
    in_work = PagesInWork()
    in_work.enter_work([1, 2, 3])
    in_work.enter_work([2, 3])
    in_work.leave_work([1, 2, 3])
    assert in_work.num_next_in_work([1, 2, 3], 0) == 0
    assert in_work.num_next_in_work([1, 2, 3], 1) == 2
    in_work.leave_work([2])
    assert in_work.num_next_in_work([1, 2, 3], 1) == 0
    assert in_work.num_next_in_work([1, 2, 3], 2) == 1
    assert in_work
    in_work.leave_work([3])
    assert not in_work


def test_only_contiguous_pages_after_the_cached_prefix_count() -> None:
    in_work = PagesInWork()
    in_work.enter_work([10, 11, 13])
    assert in_work.num_next_in_work([10, 11, 12, 13], 0) == 2
    assert in_work.num_next_in_work([10, 11, 12, 13], 2) == 0
    assert in_work.num_next_in_work([10, 11, 12, 13], 3) == 1
    assert in_work.num_next_in_work([10, 11, 12, 13], 4) == 0
    assert in_work.num_next_in_work([], 0) == 0
