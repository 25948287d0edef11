import errno
import logging
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.pagestore.server.disk import opened_folder, segment_files
from tandem.pagestore.server.disk.folder import Folder
from tandem.pagestore.server.disk.secret import namespace_secret
from tandem.pagestore.server.disk.segment_format import ENTRY_BYTES, HEAD_BYTES
from tests.fakes.disk_pages import (
    LIMIT_S,
    NUM_SLOTS,
    PAGE_BYTES,
    PAGE_FORMAT,
    DiskPages,
    page_content,
    stored_page,
    until,
)

ROOT = Path(__file__).parents[5]
ON_DISK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "pages"


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Blocks reads and writes of pages until it is set."""
    go_on = threading.Event()

    def blocking(function: Callable[..., int]) -> Callable[..., int]:
        def slow(*arguments: Any) -> int:
            go_on.wait(LIMIT_S)
            return function(*arguments)

        return slow

    monkeypatch.setattr(segment_files.os, "preadv", blocking(os.preadv))
    monkeypatch.setattr(segment_files.os, "pwritev", blocking(os.pwritev))
    yield go_on
    go_on.set()


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*.pages"))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_pages_are_read_as_written_now_and_in_the_next_life(folder: Path) -> None:
    with DiskPages(folder) as pages:
        assert pages.write(range(40)) == [*range(40)]
        assert pages.read(range(42)) == [*range(40)]
        stats = pages.tier.stats()
        assert (stats.num_pages, stats.num_written, stats.num_read, stats.num_failed) == (40, 40, 40, 0)
        added, removed = pages.tier.take_changes()
        assert (sorted(added), removed) == (sorted(stored_page(i).identity for i in range(40)), ())
    with DiskPages(folder) as pages:
        pages.wait_loaded()
        assert sorted(pages.tier.take_changes()[0]) == sorted(added)
        assert pages.read(range(42)) == [*range(40)]
        assert pages.write(range(35, 45)) == [*range(35, 45)]
        assert pages.tier.stats().num_pages == 45
        assert pages.tier.stats().num_written == 5, "a page of the tier is not written again"


def test_content_is_for_this_user_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        with DiskPages(folder) as pages:
            pages.write(range(3))
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


def test_every_queued_transfer_ends(folder: Path) -> None:
    with DiskPages(folder) as pages:
        pages.wait_loaded()
        for number in range(NUM_SLOTS):
            assert pages.tier.write(stored_page(number), pages.fill(number))
        assert sorted(ended.slot for ended in pages.ended(NUM_SLOTS)) == [*range(NUM_SLOTS)]
        for number in range(NUM_SLOTS):
            pages.tier.read(stored_page(number), number)
        pages.tier.read(stored_page(99), 0)
        assert sorted((ended.slot, ended.ok) for ended in pages.ended(NUM_SLOTS + 1)) == [
            (0, False),
            *((slot, True) for slot in range(NUM_SLOTS)),
        ]
        for number in range(NUM_SLOTS):
            pages.tier.read(stored_page(number), number)
    assert len(pages.ended(NUM_SLOTS)) == NUM_SLOTS


def test_the_oldest_segments_leave(folder: Path) -> None:
    max_bytes = 40 * PAGE_BYTES
    with DiskPages(folder, max_bytes) as pages:
        assert pages.write(range(200)) == [*range(200)]
        found = pages.read(range(200))
        assert len(found) >= 20
        assert found == [*range(200 - len(found), 200)]
        assert pages.tier.stats().num_pages == len(found)
        until(lambda: not pages.tier._book.has_retired)
        added, removed = pages.tier.take_changes()
        assert {*added} == {stored_page(i).identity for i in found}
        assert not removed, "added and removed since the last call"
        assert sum(file.stat().st_size for file in segments(folder)) <= pages.tier.stats().num_bytes <= max_bytes
    with DiskPages(folder, max_bytes // 2) as pages:
        pages.wait_loaded()
        fewer = pages.read(range(200))
        assert fewer == [*range(200 - len(fewer), 200)]
        assert 1 <= len(fewer) < len(found)
        assert sum(file.stat().st_size for file in segments(folder)) <= max_bytes // 2


def test_a_size_without_room_for_a_page_turns_the_tier_off(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with DiskPages(folder, PAGE_BYTES) as pages:
        pages.wait_loaded()
        assert_off(pages)
    assert re.search(r"may have 8192 bytes, but a page needs \d+: raise its size$", off_line(caplog))


@pytest.mark.parametrize("page_bytes", [1000, 512, 4096, 3 << 20])
def test_pages_of_any_size(folder: Path, page_bytes: int, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with DiskPages(folder, page_bytes=page_bytes) as pages:
            pages.wait_loaded()
            pages.write(range(10))
            assert pages.read(range(10)) == [*range(10)]
    refusals = [message for message in warnings(caplog) if "pass through the page cache" in message]
    assert len(refusals) == (2 if page_bytes == 1000 else 0)


def test_a_file_system_without_direct_io(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return open_file(path, flags, *rest, **named)

    open_file = os.open
    monkeypatch.setattr(segment_files.os, "open", refuse)
    with DiskPages(folder) as pages:
        pages.write(range(20))
        assert pages.read(range(20)) == [*range(20)]
    assert [message for message in warnings(caplog) if "refuses O_DIRECT" in message] == warnings(caplog)
    assert len(warnings(caplog)) == 1


def test_other_models_layouts_and_page_sizes_are_skipped(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    others = [
        replace(PAGE_FORMAT, model_fingerprint="e" * 32),
        replace(PAGE_FORMAT, layout="page_size=16 bfloat16"),
    ]
    for page_format in others:
        with DiskPages(folder, page_format=page_format) as pages:
            pages.write(range(3))
    with DiskPages(folder, page_bytes=4096) as pages:
        pages.write(range(3))
    caplog.clear()
    with DiskPages(folder) as pages:
        pages.wait_loaded()
        assert pages.read(range(3)) == []
        assert len(segments(folder)) == 3
    newest = segments(folder)[2].name
    assert warnings(caplog) == [
        f"disk tier {folder}: skipped 3 segments of another model or page layout, the newest is {newest}"
    ]
    with DiskPages(folder, page_format=others[0]) as pages:
        pages.wait_loaded()
        assert pages.read(range(3)) == [0, 1, 2], "they are kept until they are the oldest"


def test_segments_of_another_folder_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, numbers in (("a", range(3)), ("b", range(3, 6))):
        with DiskPages(tmp_path / name) as pages:
            pages.write(numbers)
    one, other = segments(tmp_path / "a")[0], segments(tmp_path / "b")[0]
    content = one.read_bytes(), other.read_bytes()
    one.write_bytes(content[1])
    other.write_bytes(content[0])
    with DiskPages(tmp_path / "a") as pages:
        pages.wait_loaded()
        assert pages.read(range(6)) == []
    assert [message for message in warnings(caplog) if "1 segments of another folder" in message]


def test_a_lost_or_damaged_record_finds_nothing(folder: Path) -> None:
    for damage in (lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?")):
        with DiskPages(folder) as pages:
            pages.write(range(3))
        damage(folder / "state")
        with DiskPages(folder) as pages:
            pages.wait_loaded()
            assert pages.read(range(3)) == []


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template") / "pages"
    with DiskPages(folder) as pages:
        pages.write(range(5))
    return folder


def fresh(template: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)
    return segments(folder)[0]


def offsets(template: Path) -> list[int]:
    """Returns a byte of each kind in a segment, and its end."""
    end = segments(template)[0].stat().st_size
    pages_begin = end - 5 * PAGE_BYTES
    around = [0, 8, 20, HEAD_BYTES, pages_begin, end]
    around += [HEAD_BYTES + ENTRY_BYTES * i for i in range(6)] + [pages_begin + PAGE_BYTES * i for i in range(5)]
    return sorted(
        {at for middle in around for at in range(middle - 1, middle + 2) if 0 <= at <= end} | {HEAD_BYTES + 9}
    )


@ON_DISK
@given(data=st.data())
def test_a_truncated_segment_serves_its_whole_pages(template: Path, folder: Path, data: st.DataObject) -> None:
    segment = fresh(template, folder)
    end = segment.stat().st_size
    length = data.draw(st.one_of(st.sampled_from(offsets(template)), st.integers(0, end)))
    os.truncate(segment, length)
    with DiskPages(folder) as pages:
        pages.wait_loaded()
        num_whole = max(0, 5 - -(-(end - length) // PAGE_BYTES))
        assert pages.read(range(5)) == [*range(num_whole)]
        assert pages.write(range(5)) == [*range(5)]
        assert pages.read(range(5)) == [*range(5)]


@ON_DISK
@given(data=st.data())
def test_flipped_bits_lose_a_page_at_most_or_a_head(template: Path, folder: Path, data: st.DataObject) -> None:
    segment = fresh(template, folder)
    content = bytearray(segment.read_bytes())
    at = data.draw(st.one_of(st.sampled_from(offsets(template)[:-2]), st.integers(0, len(content) - 1)))
    at = min(at, len(content) - 1)
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    segment.write_bytes(content)
    with DiskPages(folder) as pages:
        pages.wait_loaded()
        found = pages.read(range(5))
        assert len(found) >= (0 if at < HEAD_BYTES else 4)
        assert not pages.tier.stats().is_off
        pages.write(range(5))
        assert pages.read(range(5)) == [*range(5)]


def test_exchanged_pages_and_entries_are_never_served(
    template: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    segment = fresh(template, folder)
    content = bytearray(segment.read_bytes())
    for size, begin in ((PAGE_BYTES, len(content) - 5 * PAGE_BYTES), (ENTRY_BYTES, HEAD_BYTES)):
        damaged = bytearray(content)
        damaged[begin : begin + size], damaged[begin + size : begin + 2 * size] = (
            damaged[begin + size : begin + 2 * size],
            damaged[begin : begin + size],
        )
        segment.write_bytes(damaged)
        with DiskPages(folder) as pages:
            pages.wait_loaded()
            assert pages.read(range(5)) == [2, 3, 4]
        (line,) = [message for message in warnings(caplog) if "does not match its checksum" in message]
        assert segment.name in line
        caplog.clear()


WRITER = """
import sys
from pathlib import Path
from tests.fakes.disk_pages import DiskPages, stored_page, NUM_SLOTS
pages = DiskPages(Path(sys.argv[1]), num_threads=4)
waiting = {}
for number in range(int(sys.argv[2]), 10**9):
    while number % NUM_SLOTS in waiting or not pages.tier.write(stored_page(number), pages.fill(number)):
        for ended in pages.tier.take_ended():
            print(waiting.pop(ended.slot), flush=True)
    waiting[number % NUM_SLOTS] = number
"""

PURGER = """
import os, signal, sys
from pathlib import Path
from tests.fakes.disk_pages import DiskPages, stored_page
pages = DiskPages(Path(sys.argv[1]))
pages.write(range(20))
for number in range(20, 30):
    pages.tier.write(stored_page(number), pages.fill(number))
pages.purge()
if sys.argv[2] == "write":
    pages.ended(10)
    pages.write(range(30, 33))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.004, 0.01, 0.02, 0.05])
def test_a_killed_store_leaves_whole_pages(folder: Path, seconds: float) -> None:
    first, alive = 0, set[int]()
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, folder, str(first)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as child:
            assert child.stdout
            written = {int(child.stdout.readline())}
            time.sleep(seconds)
            child.send_signal(signal.SIGKILL)
            written |= {int(line) for line in child.stdout if line.endswith("\n")}
        alive |= written
        with DiskPages(folder) as pages:
            pages.wait_loaded()
            last = max(alive) + 2 * NUM_SLOTS
            found = {*pages.read(range(last))}
            assert alive <= found
            first = last


PURGING_WRITER = """
import sys
from pathlib import Path
from tests.fakes.disk_pages import DiskPages, stored_page, NUM_SLOTS
pages = DiskPages(Path(sys.argv[1]), num_threads=4)
for number in range(10**9):
    while not pages.tier.write(stored_page(number), pages.fill(number)):
        pages.tier.take_ended()
    if number % 8 == 7:
        if number % 5 == 0:
            pages.purge()
            print(number, flush=True)
        pages.ended(8)
"""


@pytest.mark.parametrize("seconds", [0.0, 0.003, 0.01, 0.03])
def test_a_store_killed_around_a_purge_finds_nothing_of_before(folder: Path, seconds: float) -> None:
    command = [sys.executable, "-c", PURGING_WRITER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout
        purged = int(child.stdout.readline())
        time.sleep(seconds)
        child.send_signal(signal.SIGKILL)
        purged = max([purged, *(int(line) for line in child.stdout if line.endswith("\n"))])
    with DiskPages(folder) as pages:
        pages.wait_loaded()
        assert all(number > purged for number in pages.read(range(purged + 100)))


@pytest.mark.parametrize("then", ["die", "write"])
def test_a_purge_survives_the_death_of_the_store(folder: Path, then: str) -> None:
    child = subprocess.run([sys.executable, "-c", PURGER, folder, then], timeout=LIMIT_S, check=False, cwd=ROOT)
    assert child.returncode == -signal.SIGKILL
    with DiskPages(folder) as pages:
        pages.wait_loaded()
        assert pages.read(range(40)) == ([] if then == "die" else [30, 31, 32])
        until(lambda: len(segments(folder)) == (0 if then == "die" else 1))


def test_a_purge_takes_all_that_was_before(folder: Path, blocked: threading.Event) -> None:
    blocked.set()
    with DiskPages(folder, num_threads=4) as pages:
        pages.write(range(10))
        pages.tier.take_changes()
        blocked.clear()
        for number in range(10):
            pages.tier.read(stored_page(number), number)
        for number in range(10, 16):
            assert pages.tier.write(stored_page(number), pages.fill(number))
        until(lambda: {run.is_read for run in pages.tier._running} == {True, False})
        pages.tier.purge()
        assert [pages.tier.find(stored_page(number).key) for number in range(16)] == [None] * 16
        assert pages.tier.stats().num_pages == 0
        blocked.set()
        assert not any(ended.ok for ended in pages.ended(16))
        assert pages.write(range(5, 20)) == [*range(5, 20)]
        assert pages.read(range(20)) == [*range(5, 20)]
        assert pages.tier.stats().num_pages == 15
        until(lambda: len(segments(folder)) == 1)
        added, removed = pages.tier.take_changes()
        assert sorted(removed) == sorted(stored_page(i).identity for i in range(5))
        assert sorted(added) == sorted(stored_page(i).identity for i in range(10, 20))
    with DiskPages(folder) as pages:
        pages.wait_loaded()
        assert pages.read(range(20)) == [*range(5, 20)]


@pytest.mark.parametrize("seed", range(4))
def test_reads_writes_evictions_and_purges_at_once(folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    free, busy = [*range(NUM_SLOTS)], dict[int, tuple[int, bool]]()
    with DiskPages(folder, max_bytes=60 * PAGE_BYTES, num_threads=4) as pages:
        pages.wait_loaded()
        for number in range(1500):
            page_number = number if chance.random() < 0.5 else chance.randrange(max(0, number - 60), number + 1)
            page = pages.tier.find(stored_page(page_number).key)
            if free and page:
                slot = free.pop()
                pages.tier.read(page, slot)
                busy[slot] = page_number, True
            elif free and pages.tier.write(stored_page(page_number), pages.fill_slot(page_number, free[-1])):
                busy[free.pop()] = page_number, False
            if chance.random() < 0.005:
                pages.tier.purge()
                assert pages.tier.find(stored_page(page_number).key) is None
            for ended in pages.tier.take_ended():
                its_number, is_read = busy.pop(ended.slot)
                assert ended.page == stored_page(its_number)
                assert not (is_read and ended.ok) or pages.content(ended.slot) == page_content(its_number)
                free.append(ended.slot)
        ended_last = pages.ended(len(busy))
        assert sorted(ended.slot for ended in ended_last) == sorted(busy)
        stats = pages.tier.stats()
        assert not stats.is_off
        assert stats.num_pages == len(pages.read(range(1500)))


def off_line(caplog: pytest.LogCaptureFixture) -> str:
    (line,) = [message for message in warnings(caplog) if "is off until the store restarts" in message]
    return line


def assert_off(pages: DiskPages) -> None:
    assert pages.tier.stats().is_off
    assert pages.tier.stats().num_pages == 0
    assert pages.tier.find(stored_page(0).key) is None
    assert not pages.tier.write(stored_page(50), 0)
    pages.tier.read(stored_page(0), 3)
    assert [(ended.slot, ended.ok) for ended in pages.ended(1)] == [(3, False)]


def fail_with(number: int) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("function", "number"),
    [("pwritev", errno.ENOSPC), ("pwritev", errno.EIO), ("preadv", errno.EIO), ("open", errno.EROFS)],
)
def test_a_failing_disk_turns_the_tier_off(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, function: str, number: int
) -> None:
    with DiskPages(folder) as pages:
        pages.write(range(5))
        pages.tier.take_changes()
        with monkeypatch.context() as patch:
            patch.setattr(segment_files.os, function, fail_with(number))
            for slot in range(5):
                pages.tier.read(stored_page(slot), slot)
                pages.tier.write(stored_page(10 + slot), 10 + slot)
            until(lambda: pages.tier.stats().is_off)
            until(lambda: not pages.tier._running)
        pages.tier.take_ended()
        assert_off(pages)
        until(lambda: not pages.tier._book.has_retired)
        assert {*pages.tier.take_changes()[1]} == {stored_page(i).identity for i in range(5)}
        pages.tier.purge()
    assert os.strerror(number) in off_line(caplog)


def test_a_file_size_limit_turns_the_tier_off(folder: Path) -> None:
    program = f"""
import resource, logging
from pathlib import Path
from tests.fakes.disk_pages import DiskPages
logging.basicConfig()
resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))
with DiskPages(Path({str(folder)!r})) as pages:
    print(len(pages.write(range(500))), pages.tier.stats().is_off)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, timeout=60, check=True, capture_output=True, text=True, cwd=ROOT)
    written, is_off = done.stdout.split()
    assert is_off == "True"
    assert 100 < int(written) < 366
    assert done.stderr.count("is off until the store restarts") == 1
    with DiskPages(folder) as pages:
        pages.wait_loaded()
        assert pages.read(range(500)) == [*range(int(written))]


def test_a_removed_folder_turns_the_tier_off(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with DiskPages(folder) as pages:
        pages.write(range(5))
        shutil.rmtree(folder)
        folder.mkdir(0o700)
        assert not pages.write_one(5)
        assert_off(pages)
        assert [*folder.iterdir()] == [], "a folder that takes its place is left alone"
    assert "No such file or directory" in off_line(caplog)


def test_a_hanging_disk_keeps_only_the_slots_in_the_kernels_hands(
    folder: Path, caplog: pytest.LogCaptureFixture, blocked: threading.Event
) -> None:
    now = [0.0]
    blocked.set()
    with DiskPages(folder, clock=lambda: now[0]) as pages:
        pages.write(range(15))
        blocked.clear()
        # Every second page, so that each read is a run of its own.
        for slot in range(0, 15, 2):
            pages.tier.read(stored_page(slot), slot)
        until(lambda: len(pages.tier._running) == 2)
        pages.tier.take_ended()
        now[0] += 3600
        assert not pages.tier.take_ended(), "a store that was paused blames no disk"
        assert not pages.tier.stats().is_off
        ended = []
        for _ in range(12):
            now[0] += 1
            ended += pages.tier.take_ended()
        assert sorted((e.slot, e.ok) for e in ended) == [(slot, False) for slot in range(4, 15, 2)]
        assert "takes more than 10 s" in off_line(caplog)
        assert not pages.tier.take_ended()
        blocked.set()
        assert sorted((e.slot, e.ok) for e in pages.ended(2)) == [(0, False), (2, False)]
        assert_off(pages)


def test_an_unexpected_failure_turns_the_tier_off_and_ends_its_transfers(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskPages(folder) as pages:
        pages.write(range(3))
        monkeypatch.setattr(pages.tier._book, "allot", lambda *_: 1 / 0)
        assert not pages.write_one(3)
        assert_off(pages)
    assert "ZeroDivisionError" in off_line(caplog)


def test_files_that_cannot_be_removed_turn_the_tier_off(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskPages(folder, max_bytes=16 * PAGE_BYTES) as pages:
        pages.write(range(5))
        pages.tier.take_changes()
        monkeypatch.setattr(segment_files.os, "unlink", fail_with(errno.EROFS))
        pages.tier.purge()
        until(lambda: pages.tier.stats().is_off and not pages.tier._book.has_retired)
        assert_off(pages)
        assert len(pages.tier.take_changes()[1]) == 5
    assert "Read-only file system" in off_line(caplog)


def test_one_store_a_folder(folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskPages(folder) as first:
        first.wait_loaded()
        monkeypatch.setattr(opened_folder, "IN_USE_LIMIT_S", 0.05)
        with DiskPages(folder) as second:
            second.wait_loaded()
            assert_off(second)
    assert "is in use by another page store" in off_line(caplog)
    with DiskPages(folder) as pages:
        assert pages.write(range(2)) == [0, 1]


def test_a_store_waits_for_the_end_of_the_one_before(folder: Path) -> None:
    first = DiskPages(folder)
    first.write(range(2))
    with DiskPages(folder) as second:
        time.sleep(0.1)
        first.tier.close()
        second.wait_loaded()
        assert second.read(range(2)) == [0, 1]


@pytest.fixture
def slow_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Blocks the folder's opening and the record of purges until it is set."""
    go_on = threading.Event()

    def blocking(function: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any, **named: Any) -> Any:
            assert threading.current_thread() is not threading.main_thread(), "the store's thread waits for the disk"
            go_on.wait(LIMIT_S)
            return function(*arguments, **named)

        return slow

    monkeypatch.setattr(opened_folder, "Folder", blocking(Folder))
    monkeypatch.setattr(Folder, "record_purges", blocking(Folder.record_purges))
    yield go_on
    go_on.set()


def test_the_caller_never_waits_for_the_folder(folder: Path, slow_state: threading.Event) -> None:
    slow_state.set()
    with DiskPages(folder) as pages:
        pages.write(range(5))
    slow_state.clear()
    with DiskPages(folder) as pages:
        assert not pages.tier.find(stored_page(0).key) and not pages.tier.write(stored_page(9), pages.fill(9))
        assert pages.tier.take_changes() == ((), ()) and pages.tier.stats().num_pages == 0
        # Pages of before are never found, although the folder is not open yet.
        pages.tier.purge()
        assert pages.tier.is_purging
        slow_state.set()
        until(lambda: not pages.tier.is_purging)
        pages.wait_loaded()
        assert pages.read(range(5)) == []
        assert pages.write(range(2)) == [0, 1]
        slow_state.clear()
        pages.tier.purge()
        pages.tier.purge()
        assert pages.tier.is_purging and not pages.tier.find(stored_page(0).key)
        slow_state.set()
        until(lambda: not pages.tier.is_purging and not segments(folder))
    with DiskPages(folder) as pages:
        pages.wait_loaded()
        assert pages.read(range(5)) == [] and not pages.tier.stats().is_off


def test_a_hanging_read_keeps_no_purge_from_its_record(
    folder: Path, blocked: threading.Event, slow_state: threading.Event
) -> None:
    now = [0.0]
    blocked.set()
    slow_state.set()
    with DiskPages(folder, clock=lambda: now[0]) as pages:
        pages.write(range(3))
        blocked.clear()
        pages.tier.read(stored_page(0), 0)
        until(lambda: len(pages.tier._running) == 1)
        for _ in range(12):
            now[0] += 1
            pages.tier.take_ended()
        assert_off(pages)
        slow_state.clear()
        pages.tier.purge()
        pages.tier.take_ended()
        assert pages.tier.is_purging, "a thread is free for the record"
        slow_state.set()
        until(lambda: not pages.tier.is_purging)
        blocked.set()
    with DiskPages(folder) as pages:
        pages.wait_loaded()
        assert pages.read(range(3)) == []


def test_a_purge_that_cannot_be_recorded_ends_with_a_line(
    folder: Path, caplog: pytest.LogCaptureFixture, slow_state: threading.Event
) -> None:
    now = [0.0]
    slow_state.set()
    with DiskPages(folder, clock=lambda: now[0]) as pages:
        pages.wait_loaded()
        slow_state.clear()
        pages.tier.purge()
        for _ in range(12):
            now[0] += 1
            pages.tier.take_ended()
        assert_off(pages)
        assert not pages.tier.is_purging
        assert any("a purge is not recorded, so pages stay: remove the folder" in line for line in warnings(caplog))
        slow_state.set()


def test_an_emptied_folder_gets_the_cluster_s_secret_again(folder: Path) -> None:
    secret = namespace_secret(folder)
    shutil.rmtree(folder)
    folder.mkdir(0o700)
    with DiskPages(folder, namespace_secret=secret) as pages:
        assert pages.write(range(2)) == [0, 1]
    assert namespace_secret(folder) == secret
    with DiskPages(folder, namespace_secret=secret) as pages:
        pages.wait_loaded()
        assert pages.read(range(2)) == [0, 1]


def test_a_folder_of_another_cluster_is_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = namespace_secret(folder)
    with DiskPages(folder, namespace_secret="ab" * 32) as pages:
        pages.wait_loaded()
        assert_off(pages)
    assert "is not the secret that this cluster began with: another folder took its place" in off_line(caplog)
    assert namespace_secret(folder) == own


def test_a_disk_that_fails_at_the_start_is_off(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", fail_with(errno.EROFS))
    with DiskPages(folder) as pages:
        pages.tier.purge()
        pages.wait_loaded()
        assert_off(pages)
        assert pages.tier.take_changes() == ((), ())
        pages.purge()
    assert "Read-only file system" in off_line(caplog)


def test_a_page_whose_keys_fit_no_entry_is_not_written(folder: Path) -> None:
    with DiskPages(folder) as pages:
        pages.wait_loaded()
        assert pages.tier.write(stored_page(0)._replace(parent=b"short"), pages.fill(0))
        assert [ended.ok for ended in pages.ended(1)] == [False]
        assert not pages.tier.stats().is_off


def test_the_region_can_be_closed_after_the_tier(folder: Path) -> None:
    with DiskPages(folder) as pages:
        pages.write(range(3))
        pages.read(range(3))
    pages.region.close()
