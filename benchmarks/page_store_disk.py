"""Measures the page store's disk tier beside plain reads and writes of the same blocks.

Plain: as many threads move blocks of 2 MiB between memory and one file, with O_DIRECT, without index or checksums. Also
measures a start with a full index, and its memory: segments whose pages are holes, so they need no room on the disk.
"""

import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.rows import Row, argument_parser, report
from tandem.messages import PageFormat
from tandem.pagestore.keys import page_key
from tandem.pagestore.server.base import StoredPage
from tandem.pagestore.server.disk.disk_tier import DiskTier
from tandem.pagestore.server.disk.folder import Folder
from tandem.pagestore.server.disk.segment_book import SegmentBook
from tandem.pagestore.server.disk.segment_files import SegmentFiles
from tandem.pagestore.server.disk.segment_format import ENTRY_BYTES, HEAD_BYTES, Entry, encode_entry

BLOCK_BYTES = 1 << 21
NUM_SLOTS_BYTES = 1 << 28
POLL_S = 0.0005
GIB = 1 << 30


def page_format(page_bytes: int) -> PageFormat:
    return PageFormat("f" * 32, page_bytes, "page_size=16 bfloat16")


def stored_page(number: int) -> StoredPage:
    key = page_key(b"", [number])
    return StoredPage(key, page_key(b"parent", [number]), key[:8], "a")


def plain_gbps(path: Path, region: mmap.mmap, num_bytes: int, num_threads: int, is_read: bool) -> float:
    blocks = iter(range(0, num_bytes, BLOCK_BYTES))
    lock = threading.Lock()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)

    def move() -> None:
        while True:
            with lock:
                offset = next(blocks, None)
            if offset is None:
                return
            begin = offset % NUM_SLOTS_BYTES
            block = [memoryview(region)[begin : begin + BLOCK_BYTES]]
            num_moved = (os.preadv if is_read else os.pwritev)(descriptor, block, offset)
            assert num_moved == BLOCK_BYTES

    threads = [threading.Thread(target=move) for _ in range(num_threads)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    os.close(descriptor)
    return num_bytes / seconds / 1e9


def tier_gbps(tier: DiskTier, num_pages: int, page_bytes: int, num_slots: int, is_read: bool) -> float:
    free = [*range(num_slots)]
    next_page = num_ended = 0
    began = time.perf_counter()
    while num_ended < num_pages:
        while free and next_page < num_pages:
            page = stored_page(next_page)
            if is_read:
                tier.read(page, free.pop())
            elif tier.write(page, free[-1]):
                free.pop()
            else:
                break
            next_page += 1
        for ended in tier.take_ended():
            assert ended.ok
            free.append(ended.slot)
            num_ended += 1
        time.sleep(POLL_S)
    return num_pages * page_bytes / (time.perf_counter() - began) / 1e9


def transfers(directory: Path, page_bytes: int, num_bytes: int, num_threads: int) -> Iterator[Row]:
    region = mmap.mmap(-1, NUM_SLOTS_BYTES)
    region[:] = os.urandom(1 << 20) * (NUM_SLOTS_BYTES >> 20)
    num_slots, num_pages = NUM_SLOTS_BYTES // page_bytes, num_bytes // page_bytes
    tier = DiskTier(directory / "tier", 2 * num_bytes, page_format(page_bytes), region, page_bytes, num_threads)
    wait(lambda: tier.is_loaded)
    plain = directory / "plain"
    for name, is_read in (("write", False), ("read", True)):
        expected = plain_gbps(plain, region, num_bytes, num_threads, is_read)
        yield Row(f"{name}, plain", expected, "GB/s")
        measured = tier_gbps(tier, num_pages, page_bytes, num_slots, is_read)
        yield Row(f"{name}, tier", measured, "GB/s")
        yield Row(f"{name}, tier beside plain", measured / expected, "x")
    plain.unlink()
    tier.close()


def start(directory: Path, page_bytes: int, num_pages: int) -> Iterator[Row]:
    folder = Folder(directory)
    files = SegmentFiles(folder, page_bytes)
    max_bytes = 2 * num_pages * page_bytes
    book = SegmentBook(folder, files, page_format(page_bytes), max_bytes, threading.Lock())
    list(book.load())
    written = 0
    while written < num_pages and (positions := book.allot(num_pages - written, 0)):
        numbers = range(written, written + positions.num)
        table = b"".join(encode_entry(positions.head.epoch, Entry(stored_page(i), 0)) for i in numbers)
        path = directory / f"segment-{positions.segment.number:012d}.pages"
        with path.open("r+b") as file:
            file.seek(HEAD_BYTES + ENTRY_BYTES * positions.first)
            file.write(table)
            file.truncate(positions.head.num_bytes)
        written += positions.num
    folder.close()
    os.sync()
    region = mmap.mmap(-1, page_bytes)
    before, began = resident_bytes(), time.perf_counter()
    tier = DiskTier(directory, max_bytes, page_format(page_bytes), region, page_bytes)
    made = time.perf_counter() - began
    longest = 0.0
    while not tier.is_loaded:
        asked = time.perf_counter()
        tier.find(b"")
        longest = max(longest, time.perf_counter() - asked)
        time.sleep(POLL_S)
    seconds = time.perf_counter() - began
    assert tier.stats().num_pages == num_pages
    yield Row("start: constructor", made * 1e3, "ms")
    yield Row(f"start: {num_pages:,} pages found in", seconds, "s")
    yield Row("start: longest call meanwhile", longest * 1e3, "ms")
    tier.take_changes()
    yield Row("memory", (resident_bytes() - before) / num_pages, "bytes a page")
    asked = time.perf_counter()
    tier.purge()
    yield Row("purge", (time.perf_counter() - asked) * 1e3, "ms")
    wait(lambda: not any(directory.glob("segment-*")))
    yield Row("purge: all files removed after", time.perf_counter() - asked, "s")
    tier.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def wait(condition: Callable[[], bool], limit_s: float = 600.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(POLL_S)


def main(arguments: Sequence[str]) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--directory", type=Path, help="on the disk to be measured (a temporary folder)")
    parser.add_argument("--page-bytes", type=int, default=1 << 21)
    parser.add_argument("--gib", type=float, default=2.0, help="moved each way")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--index-pages", type=int, default=500_000, help="pages of the start (500,000: 1 TB of 2 MiB)")
    options = parser.parse_args(arguments)
    num_bytes = int(options.gib * GIB) // BLOCK_BYTES * BLOCK_BYTES
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        rows = [*transfers(Path(name), options.page_bytes, num_bytes, options.threads)]
        rows += start(Path(name) / "start", options.page_bytes, options.index_pages)
    return report(rows, f"pages of {options.page_bytes >> 10} KiB", options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
