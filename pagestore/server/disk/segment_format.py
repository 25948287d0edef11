"""Format of a segment: a head, a table of entries and pages, one entry per page.

| bytes | content |
|---|---|
| 0 | head: the properties that all pages of the segment share |
| 4096 | entries of 256 bytes, by position; an entry is written after its page |
| multiple of 4096 | pages, by position |

Head and entries carry checksums, and an entry's covers the epoch of its segment. So stale bytes of a deleted file are
no entries.
"""

import json
import struct
import zlib
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import NamedTuple

from tandem.pagestore.keys import KEY_BYTES
from tandem.pagestore.server.base import StoredPage
from tandem.prefix import IDENTITY_BYTES

HEAD_BYTES = 4096
ALIGNMENT = 4096
VERSION = 1
MAX_PAGES = 2048
MAX_NAMESPACE_BYTES = 174

_MAGIC = b"TandemPg"
# Magic, version, length of the fields, checksum of the fields.
_HEAD = struct.Struct("<8sIII")
# Checksum of the rest, checksum of the page, key, length of the parent's key, that key, identity, length of the
# namespace, namespace in UTF-8; of a longer one, its digest.
_ENTRY = struct.Struct(f"<II{KEY_BYTES}sB{KEY_BYTES}s{IDENTITY_BYTES}sB{MAX_NAMESPACE_BYTES}s")
_CHECKSUM = struct.Struct("<I")
ENTRY_BYTES = _ENTRY.size
_NO_ENTRY = bytes(ENTRY_BYTES)


class TornHead(Exception):
    """No head was written here, or not all of it."""


class OtherVersion(Exception):
    """The segment has another version of the format."""


@dataclass(frozen=True, slots=True)
class SegmentHead:
    """
    Attributes:
        folder: random name of the folder, in hexadecimal digits.
        num_purges: of the folder, before the segment began.
        epoch: random name of the segment, in hexadecimal digits.
        num_pages: capacity.
    """

    folder: str
    num_purges: int
    epoch: str
    model_fingerprint: str
    layout: str
    page_bytes: int
    num_pages: int

    @property
    def pages_offset(self) -> int:
        table_end = HEAD_BYTES + ENTRY_BYTES * self.num_pages
        return -(-table_end // ALIGNMENT) * ALIGNMENT

    @property
    def num_bytes(self) -> int:
        return self.page_offset(self.num_pages)

    def page_offset(self, position: int) -> int:
        return self.pages_offset + position * self.page_bytes

    def encode(self) -> bytes:
        """Raises ValueError if the head is too long."""
        fields = json.dumps(asdict(self)).encode()
        encoded = _HEAD.pack(_MAGIC, VERSION, len(fields), zlib.crc32(fields)) + fields
        if len(encoded) > HEAD_BYTES:
            raise ValueError(f"the page layout {self.layout[:80]!r} is too long for the head of a segment")
        return encoded.ljust(HEAD_BYTES, b"\0")

    @classmethod
    def decode(cls, block: bytes) -> "SegmentHead":
        """Raises TornHead, OtherVersion."""
        if len(block) < HEAD_BYTES:
            raise TornHead
        magic, version, length, checksum = _HEAD.unpack_from(block)
        if magic != _MAGIC:
            raise TornHead
        if version != VERSION:
            raise OtherVersion
        fields = block[_HEAD.size : _HEAD.size + length]
        if zlib.crc32(fields) != checksum:
            raise TornHead
        try:
            head = cls(**json.loads(fields))
        except (TypeError, ValueError):
            raise TornHead from None
        if not 0 < head.num_pages <= MAX_PAGES or head.page_bytes <= 0:
            raise TornHead
        return head


class Entry(NamedTuple):
    """Attributes: checksum: `page_checksum` of the page."""

    page: StoredPage
    checksum: int


def page_checksum(key: bytes, content: memoryview) -> int:
    """Returns the checksum of a page, which covers its key too."""
    return zlib.crc32(content, zlib.crc32(key))


def is_storable(page: StoredPage) -> bool:
    """Returns whether the page's keys fit an entry."""
    return len(page.key) == KEY_BYTES and len(page.parent) in (0, KEY_BYTES) and len(page.identity) == IDENTITY_BYTES


def encode_entry(epoch: str, entry: Entry) -> bytes:
    (key, parent, identity, namespace), checksum = entry
    encoded_name = namespace.encode()
    if len(encoded_name) > MAX_NAMESPACE_BYTES:
        # Clients choose names. The key covers the whole name; this one serves quotas alone.
        encoded_name = blake2b(encoded_name, digest_size=KEY_BYTES).hexdigest().encode()
    rest = _ENTRY.pack(0, checksum, key, len(parent), parent, identity, len(encoded_name), encoded_name)[
        _CHECKSUM.size :
    ]
    return _CHECKSUM.pack(_entry_checksum(epoch, rest)) + rest


def decode_entries(epoch: str, table: bytes) -> tuple[list[tuple[int, Entry]], int]:
    """Returns entries with their positions, and the number of torn ones."""
    entries, num_torn = [], 0
    seed = zlib.crc32(epoch.encode())
    view = memoryview(table)[: len(table) // ENTRY_BYTES * ENTRY_BYTES]
    for position, fields in enumerate(_ENTRY.iter_unpack(view)):
        begin, end = position * ENTRY_BYTES, (position + 1) * ENTRY_BYTES
        expected, checksum, key, parent_len, parent, identity, name_len, name = fields
        if zlib.crc32(view[begin + _CHECKSUM.size : end], seed) == expected:
            page = StoredPage(key, parent[:parent_len], identity, name[:name_len].decode())
            entries.append((position, Entry(page, checksum)))
        elif view[begin:end] != _NO_ENTRY:
            num_torn += 1
    return entries, num_torn


def _entry_checksum(epoch: str, rest: bytes) -> int:
    return zlib.crc32(rest, zlib.crc32(epoch.encode()))
