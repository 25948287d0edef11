import mmap
from collections.abc import Sequence

from tandem.pagestore.server.disk.page_index import Place, Segment
from tandem.pagestore.server.disk.segment_book import Positions
from tandem.pagestore.server.disk.segment_files import SegmentFiles
from tandem.pagestore.server.disk.segment_format import Entry, encode_entry, page_checksum
from tandem.pagestore.server.disk.transfers import Transfer


class PageIo:
    """Moves pages between the region and segments. Any thread may call all methods.

    Args:
        region: all slots of `page_bytes`.
    """

    def __init__(self, region: memoryview | mmap.mmap, page_bytes: int, files: SegmentFiles) -> None:
        self._region = memoryview(region).cast("B")
        self._page_bytes = page_bytes
        self._files = files

    def read(self, segment: Segment, place: Place, reads: Sequence[Transfer]) -> list[bool]:
        """Reads consecutive pages from `place` on. Returns which of them are whole. Raises OSError."""
        slots = [self._slot(read) for read in reads]
        offset = segment.pages_offset + place.position * self._page_bytes
        num_bytes = self._files.read(place.segment, offset, slots)
        num_whole = num_bytes // self._page_bytes
        return [
            i < num_whole and page_checksum(read.page.key, slot) == read.checksum
            for i, (read, slot) in enumerate(zip(reads, slots, strict=True))
        ]

    def write(self, positions: Positions, writes: Sequence[Transfer]) -> list[Entry]:
        """Writes pages and their entries. Raises OSError."""
        slots = [self._slot(write) for write in writes]
        entries = [
            Entry(write.page, page_checksum(write.page.key, slot)) for write, slot in zip(writes, slots, strict=True)
        ]
        table = b"".join(encode_entry(positions.head.epoch, entry) for entry in entries)
        self._files.write(positions.segment.number, positions.head, positions.first, slots, table)
        return entries

    def close(self) -> None:
        self._region.release()

    def _slot(self, transfer: Transfer) -> memoryview:
        begin = transfer.slot * self._page_bytes
        return self._region[begin : begin + self._page_bytes]
