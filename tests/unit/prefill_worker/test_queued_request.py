"""Pages of a request that other jobs are computing."""

from tandem.prefill_worker.queued_request import PagesInWork


def test_pages_are_in_work_as_long_as_one_job_has_yet_to_compute_them() -> None:
    in_work = PagesInWork()
    in_work.enter_work([1, 2, 3])
    in_work.enter_work([2, 3])
    in_work.leave_work([1, 2, 3])
    assert in_work.num_next_in_work([1, 2, 3], 0) == 0
    assert in_work.num_next_in_work([1, 2, 3], 1) == 2
    in_work.leave_work([2])
    assert in_work.num_next_in_work([1, 2, 3], 1) == 0
    assert in_work.num_next_in_work([1, 2, 3], 2) == 1


def test_only_an_unbroken_run_after_what_is_cached_counts() -> None:
    in_work = PagesInWork()
    in_work.enter_work([10, 11, 13])
    assert in_work.num_next_in_work([10, 11, 12, 13], 0) == 2
    assert in_work.num_next_in_work([10, 11, 12, 13], 2) == 0
    assert in_work.num_next_in_work([10, 11, 12, 13], 3) == 1
    assert in_work.num_next_in_work([10, 11, 12, 13], 4) == 0
    assert in_work.num_next_in_work([], 0) == 0
