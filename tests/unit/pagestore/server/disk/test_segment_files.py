import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.pagestore.server.disk import segment_files
from tandem.pagestore.server.disk.folder import Folder
from tandem.pagestore.server.disk.segment_files import SegmentFiles, segment_name
from tandem.pagestore.server.disk.segment_format import ENTRY_BYTES, SegmentHead

PAGE = 4096
HEAD = SegmentHead("a" * 32, 3, "b" * 32, "f" * 32, "layout", PAGE, 2000)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path / "pages")
    yield folder
    folder.close()


def buffers(num: int, fill: bytes = b"\0") -> list[memoryview]:
    region = mmap.mmap(-1, num * PAGE)
    region[:] = fill * (num * PAGE)
    return [memoryview(region)[i * PAGE : (i + 1) * PAGE] for i in range(num)]


def test_pages_and_entries_are_read_as_written(folder: Folder) -> None:
    files = SegmentFiles(folder, PAGE)
    files.create(7, HEAD)
    files.write(7, HEAD, 1000, buffers(3, b"x"), b"e" * ENTRY_BYTES * 3)
    head, table = files.read_head(7)
    assert head == HEAD
    assert table == bytes(1000 * ENTRY_BYTES) + b"e" * ENTRY_BYTES * 3 + bytes(997 * ENTRY_BYTES)
    into = buffers(4)
    assert files.read(7, HEAD.page_offset(1000), into) == 3 * PAGE
    assert [bytes(buffer) for buffer in into] == [b"x" * PAGE] * 3 + [bytes(PAGE)]
    files.create(3, HEAD)
    assert [*files.sizes()] == [3, 7]
    with pytest.raises(FileExistsError):
        files.create(3, HEAD)
    files.remove(7)
    assert files.sizes() == {3: PAGE}


def test_other_files_are_no_segments(folder: Folder) -> None:
    for name in ("segment-1.pages", "segment-000000000001.pages.old", "x-segment-000000000001.pages"):
        (folder.path / name).touch()
    assert SegmentFiles(folder, PAGE).sizes() == {}


def test_unaligned_memory_goes_through_the_page_cache(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    files = SegmentFiles(folder, PAGE)
    files.create(0, HEAD)
    unaligned = memoryview(bytearray(2 * PAGE))[1 : PAGE + 1]
    unaligned[:] = b"y" * PAGE
    files.write(0, HEAD, 0, [unaligned], bytes(ENTRY_BYTES))
    into = buffers(1)
    assert files.read(0, HEAD.page_offset(0), into) == PAGE
    assert bytes(into[0]) == b"y" * PAGE
    if not files.is_direct:
        assert len(caplog.records) == 1


def test_a_part_that_was_written_is_a_failure(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    files = SegmentFiles(folder, PAGE)
    monkeypatch.setattr(segment_files.os, "pwritev", lambda *_: 100)
    with pytest.raises(OSError, match="100 of 4096 bytes written"):
        files.create(0, HEAD)
    assert files.sizes() == {}


def test_errors_are_passed_on_and_leave_no_descriptor(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    files = SegmentFiles(folder, PAGE)
    files.create(0, HEAD)
    num_open = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    monkeypatch.setattr(segment_files.os, "pwritev", fail)
    monkeypatch.setattr(segment_files.os, "preadv", fail)
    with pytest.raises(OSError, match="Input/output"):
        files.write(0, HEAD, 0, buffers(1), bytes(ENTRY_BYTES))
    with pytest.raises(OSError, match="Input/output"):
        files.read(0, 0, buffers(1))
    with pytest.raises(OSError, match="Input/output"):
        files.create(1, HEAD)
    with pytest.raises(FileNotFoundError):
        files.read_head(1)
    assert files.is_direct
    assert len(os.listdir("/proc/self/fd")) == num_open  # noqa: PTH208
    assert not (folder.path / segment_name(1)).exists()
