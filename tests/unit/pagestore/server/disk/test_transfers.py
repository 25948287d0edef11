from hypothesis import given
from hypothesis import strategies as st

from tandem.pagestore.server.disk.page_index import Place
from tandem.pagestore.server.disk.transfers import StallWatch, Transfer, TransferQueue
from tests.fakes.disk_pages import stored_page


def positions(run: object) -> list[int]:
    assert hasattr(run, "__iter__")
    return [transfer.place.position for transfer in run]


def read_queue(order: list[int], run_len: int = 4) -> TransferQueue:
    queue = TransferQueue(run_len, 2)
    for position in order:
        queue.add_read(stored_page(position), position, Place(0, position), 0)
    return queue


def test_reads_of_consecutive_places_are_one_run() -> None:
    queue = read_queue([0, 1, 7, 2, 8, 3, 4, 20])
    assert positions(queue.take_reads(True)) == [0, 1, 2, 3]
    assert positions(queue.take_reads(True)) == [7, 8]
    assert positions(queue.take_reads(True)) == [4]
    assert positions(queue.take_reads(True)) == [20]
    assert positions(queue.take_reads(True)) == []


def test_runs_end_with_their_segment() -> None:
    queue = TransferQueue(4, 2)
    queue.add_read(stored_page(0), 0, Place(0, 5), 0)
    queue.add_read(stored_page(1), 1, Place(1, 6), 0)
    assert len(queue.take_reads(True)) == 1


def test_writes_have_a_turn_between_reads() -> None:
    queue = read_queue([*range(0, 100, 2)])
    queue.add_write(stored_page(0), 0)
    assert [bool(queue.take_reads(False)) for _ in range(3)] == [True] * 3
    assert [bool(queue.take_reads(True)) for _ in range(6)] == [True] * 5 + [False]
    assert len(queue.take_writes()) == 1
    assert all(queue.take_reads(True) for _ in range(9)), "no write waits"


def test_writes_that_wait_are_bounded() -> None:
    queue = TransferQueue(4, 2)
    queue.add_write(stored_page(0), 0)
    assert queue.takes_writes
    queue.add_write(stored_page(1), 1)
    assert not queue.takes_writes
    assert [transfer.slot for transfer in queue.take_writes()] == [0, 1]
    assert queue.takes_writes


@given(st.lists(st.integers(0, 12)), st.integers(1, 5))
def test_every_read_is_taken_once(order: list[int], run_len: int) -> None:
    queue = read_queue(order, run_len)
    taken: list[Transfer] = []
    while run := queue.take_reads(True):
        assert queue.first_read is None or queue.first_read >= 0
        assert len(run) <= run_len
        assert positions(run) == [*range(positions(run)[0], positions(run)[0] + len(run))]
        taken += run
    assert sorted(transfer.number for transfer in taken) == [*range(len(order))]
    assert queue.take_all() == []


def test_all_is_taken_at_the_end() -> None:
    queue = read_queue([0, 1])
    queue.add_write(stored_page(5), 5)
    assert queue.first_read == 0
    assert [transfer.slot for transfer in queue.take_all()] == [0, 1, 5]
    assert queue.first_read is None
    assert queue.take_all() == []


def test_a_stall_is_the_same_oldest_transfer_for_long() -> None:
    watch = StallWatch(10.0)
    assert not any(watch.is_stalled([now // 5, 1000], float(now)) for now in range(100)), "some progress"
    assert not any(watch.is_stalled([], float(now)) for now in range(100, 120)), "idle"
    stalled = [watch.is_stalled([7, 8], float(now)) for now in range(120, 140)]
    assert stalled == [False] * 11 + [True] * 9


def test_a_pause_of_the_process_is_no_stall() -> None:
    watch = StallWatch(10.0)
    assert not watch.is_stalled([7], 0.0)
    assert not watch.is_stalled([7], 3600.0)
    assert not watch.is_stalled([7], 7200.0)
