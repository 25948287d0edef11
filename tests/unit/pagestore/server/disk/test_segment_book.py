import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.messages import PageFormat
from tandem.pagestore.server.disk.folder import Folder
from tandem.pagestore.server.disk.segment_book import SegmentBook
from tandem.pagestore.server.disk.segment_files import SegmentFiles, segment_name
from tandem.pagestore.server.disk.segment_format import Entry, SegmentHead, encode_entry
from tests.fakes.disk_pages import PAGE_BYTES, PAGE_FORMAT, stored_page

LIMIT = 40 * PAGE_BYTES


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path / "pages")
    yield folder
    folder.close()


def open_book(folder: Folder, max_bytes: int = LIMIT, page_format: PageFormat = PAGE_FORMAT) -> SegmentBook:
    book = SegmentBook(folder, SegmentFiles(folder, PAGE_BYTES), page_format, max_bytes, threading.Lock())
    assert not book.is_listed
    for _ in book.load():
        assert book.is_listed
    return book


def num_files(folder: Folder) -> int:
    return len([*folder.path.glob("segment-*")])


def test_positions_follow_each_other_and_fill_segments(folder: Folder) -> None:
    book = open_book(folder)
    taken = []
    for _ in range(10):
        positions = book.allot(3, 0)
        assert positions is not None
        taken += [(positions.segment.number, positions.first + i) for i in range(positions.num)]
    num_pages = max(position for _, position in taken) + 1
    assert taken == [(i // num_pages, i % num_pages) for i in range(len(taken))]


def test_the_oldest_segment_makes_room(folder: Folder) -> None:
    book = open_book(folder)
    for _ in range(100):
        assert book.allot(4, 0)
        assert book.index.num_bytes <= LIMIT
        assert num_files(folder) == len(book.index.segments)
    first = next(iter(book.index.segments))
    assert [*book.index.segments] == [*range(first, first + len(book.index.segments))]


def test_pages_taken_up_before_a_purge_get_no_place_after_it(folder: Folder) -> None:
    book = open_book(folder)
    assert book.allot(1, 0)
    book.purge_locked()
    assert book.allot(1, 0) is None
    positions = book.allot(1, 1)
    assert positions is not None
    assert (positions.segment.number, positions.first, positions.head.num_purges) == (1, 0, 1)
    book.tidy()
    assert num_files(folder) == 2, "a death of the process would undo the purge"
    book.record_purges()
    book.tidy()
    assert num_files(folder) == 1


def test_a_purge_while_a_segment_is_made_leaves_no_segment(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def create_and_purge(number: int, head: SegmentHead) -> None:
        create(number, head)
        folder.num_purges += 1
        folder.record_purges()

    book = open_book(folder)
    create = book._files.create
    monkeypatch.setattr(book._files, "create", create_and_purge)
    assert book.allot(1, 0) is None
    assert num_files(folder) == 0
    assert not book.index.segments


def test_a_segment_purged_in_an_earlier_life_is_removed(folder: Folder) -> None:
    assert open_book(folder).allot(1, 0)
    folder.num_purges += 1
    folder.record_purges()
    book = open_book(folder)
    assert not book.index.segments
    assert book.has_retired
    book.tidy()
    assert num_files(folder) == 0
    assert not book.has_retired


def test_the_newest_copy_of_a_page_is_found(folder: Folder) -> None:
    for life in range(3):
        book = open_book(folder)
        positions = book.allot(1, 0)
        assert positions is not None
        table = encode_entry(positions.head.epoch, Entry(stored_page(5), life))
        content = [memoryview(bytes(PAGE_BYTES))]
        book._files.write(positions.segment.number, positions.head, positions.first, content, table)
    book = open_book(folder)
    place = book.index.place(stored_page(5).key)
    assert place == (2, 0)
    assert book.index.segments[2].entry(0).checksum == 2
    assert book.index.num_pages == 1


def test_each_kind_of_skipped_segment_has_one_line(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    book = open_book(folder)
    for _ in range(6):
        assert book.allot(100, 0)
    paths = [folder.path / segment_name(i) for i in range(6)]
    paths[0].write_bytes(b"")
    paths[1].write_bytes(b"x" * 5000)
    head = paths[2].read_bytes()
    paths[2].write_bytes(head[:8] + b"\x63" + head[9:])
    paths[3].unlink()
    paths[3].mkdir()
    paths[4].unlink()
    caplog.set_level(logging.WARNING)
    book = open_book(folder)
    lines = sorted(record.getMessage().split(": ", 1)[1] for record in caplog.records)
    assert lines == [
        "skipped 1 segments of another version of the format, the newest is segment-000000000002.pages",
        "skipped 1 segments that cannot be read (Is a directory), the newest is segment-000000000003.pages",
        "skipped 2 segments with a torn head, the newest is segment-000000000001.pages",
    ]
    assert book.index.num_pages == 0
    positions = book.allot(1, 0)
    assert positions is not None
    assert positions.segment.number == 6


def test_a_size_beyond_the_disk_is_told(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    open_book(folder, 1 << 60)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"may have {1 << 60} bytes, but its file system has room for" in line


def test_a_closed_book_takes_and_finds_nothing(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def create_and_close(number: int, head: SegmentHead) -> None:
        create(number, head)
        book.close_locked()

    book = open_book(folder)
    assert book.allot(100, 0)
    create = book._files.create
    monkeypatch.setattr(book._files, "create", create_and_close)
    assert book.allot(1, 0) is None
    assert book.allot(1, 0) is None
    assert [*book.load()] == []
    assert not book.index.segments
    book.tidy()
    assert num_files(folder) == 1, "the files stay"
