"""Places of the pages on disk, in about 300 bytes of memory a page. The owner guards the index with a lock."""

import struct
import sys
from typing import NamedTuple

from tandem.page_changes import PageChangeLog
from tandem.pagestore.keys import KEY_BYTES
from tandem.pagestore.server.base import StoredPage
from tandem.pagestore.server.disk.segment_format import MAX_PAGES, Entry
from tandem.prefix import IDENTITY_BYTES

# Key of the parent (zeros: none), identity, checksum.
_RECORD = struct.Struct(f"<{KEY_BYTES}s{IDENTITY_BYTES}sI")
_NO_PARENT = bytes(KEY_BYTES)


class Place(NamedTuple):
    segment: int
    position: int


class Segment:
    """
    Attributes:
        num_bytes: size of the file, or its planned size while it is being written.
        pages_offset: of position 0 in the file; 0: its pages are not known.
        num_pages: pages that the index finds here.
    """

    __slots__ = ("keys", "namespaces", "num_bytes", "num_pages", "number", "pages_offset", "records")

    def __init__(self, number: int, num_bytes: int) -> None:
        self.number = number
        self.num_bytes = num_bytes
        self.num_pages = 0
        self.pages_offset = 0
        # By position; a page that the index does not find here has no key.
        self.keys: list[bytes | None] = []
        self.namespaces: list[str] = []
        self.records = bytearray()

    def reserve(self, num_pages: int) -> None:
        """Makes room for positions up to `num_pages`."""
        num_missing = num_pages - len(self.keys)
        if num_missing > 0:
            self.keys.extend([None] * num_missing)
            self.namespaces.extend([""] * num_missing)
            self.records.extend(bytes(_RECORD.size * num_missing))

    def set(self, position: int, entry: Entry) -> None:
        page, checksum = entry
        self.keys[position] = page.key
        self.namespaces[position] = sys.intern(page.namespace)
        _RECORD.pack_into(self.records, _RECORD.size * position, page.parent, page.identity, checksum)

    def entry(self, position: int) -> Entry:
        key = self.keys[position]
        assert key is not None
        parent, identity, checksum = _RECORD.unpack_from(self.records, _RECORD.size * position)
        return Entry(
            StoredPage(key, b"" if parent == _NO_PARENT else parent, identity, self.namespaces[position]), checksum
        )


class PageIndex:
    """
    Pages of a retired segment are not found any more. `clean` frees their memory, one segment at a time, because
    there may be millions.

    Attributes:
        segments: by number, oldest first.
        num_bytes, num_pages: of all segments.
        changes: by identity.
    """

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.num_bytes = 0
        self.num_pages = 0
        # Key -> segment * MAX_PAGES + position; may name a retired segment that is not cleaned yet.
        self._places: dict[bytes, int] = {}
        self.changes = PageChangeLog()

    def add_segment(self, segment: Segment) -> None:
        """Adds a segment that is newer than all others."""
        self.segments[segment.number] = segment
        self.num_bytes += segment.num_bytes

    def add(self, segment: Segment, position: int, entry: Entry) -> None:
        """Adds a page of a segment, unless a newer segment has it."""
        key, identity = entry.page.key, entry.page.identity
        packed = self._places.get(key)
        if packed is None:
            self.changes.store(identity)
        elif former := self.segments.get(packed // MAX_PAGES):
            if former.number > segment.number:
                return
            former.keys[packed % MAX_PAGES] = None
            former.num_pages -= 1
            self.num_pages -= 1
        segment.reserve(position + 1)
        segment.set(position, entry)
        segment.num_pages += 1
        self.num_pages += 1
        self._places[key] = segment.number * MAX_PAGES + position

    def place(self, key: bytes) -> Place | None:
        packed = self._places.get(key)
        if packed is None or packed // MAX_PAGES not in self.segments:
            return None
        return Place(*divmod(packed, MAX_PAGES))

    def find(self, key: bytes) -> StoredPage | None:
        place = self.place(key)
        return self.segments[place.segment].entry(place.position).page if place else None

    def forget(self, key: bytes, place: Place) -> None:
        """Removes a page, if it is still found there."""
        if self.place(key) == place:
            segment = self.segments[place.segment]
            identity = segment.entry(place.position).page.identity
            segment.keys[place.position] = None
            segment.num_pages -= 1
            self.num_pages -= 1
            del self._places[key]
            self.changes.remove(identity)

    def retire(self, number: int) -> Segment:
        segment = self.segments.pop(number)
        self.num_bytes -= segment.num_bytes
        self.num_pages -= segment.num_pages
        return segment

    def retire_all(self) -> list[Segment]:
        segments = list(self.segments.values())
        self.segments = {}
        self.num_bytes = self.num_pages = 0
        return segments

    def clean(self, segment: Segment) -> None:
        """Frees the memory of a retired segment's pages."""
        for position, key in enumerate(segment.keys):
            if key is not None and self._places.get(key) == segment.number * MAX_PAGES + position:
                del self._places[key]
                self.changes.remove(segment.entry(position).page.identity)
        segment.keys = []
