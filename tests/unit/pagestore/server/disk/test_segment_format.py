import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.pagestore.server.base import StoredPage
from tandem.pagestore.server.disk.segment_format import (
    ALIGNMENT,
    ENTRY_BYTES,
    HEAD_BYTES,
    Entry,
    OtherVersion,
    SegmentHead,
    TornHead,
    decode_entries,
    encode_entry,
    is_storable,
    page_checksum,
)

HEAD = SegmentHead("a" * 32, 3, "b" * 32, "f" * 32, "page_size=16 float32", 8192, 100)
KEYS = st.binary(min_size=32, max_size=32)
ENTRIES = st.builds(
    Entry,
    st.builds(
        StoredPage,
        KEYS,
        st.one_of(st.just(b""), KEYS),
        st.binary(min_size=8, max_size=8),
        st.text(st.characters(codec="utf-8"), max_size=43),
    ),
    st.integers(0, 2**32 - 1),
)


def test_a_head_is_read_as_written() -> None:
    block = HEAD.encode()
    assert len(block) == HEAD_BYTES
    assert SegmentHead.decode(block) == HEAD


@given(st.integers(0, HEAD_BYTES - 1), st.integers(1, 255))
def test_a_changed_head_is_torn_or_unchanged(at: int, mask: int) -> None:
    block = bytearray(HEAD.encode())
    block[at] ^= mask
    try:
        assert SegmentHead.decode(bytes(block)) == HEAD
    except (TornHead, OtherVersion):
        return


@given(st.integers(0, HEAD_BYTES - 1))
def test_a_short_head_is_torn(length: int) -> None:
    with pytest.raises(TornHead):
        SegmentHead.decode(HEAD.encode()[:length])


def test_another_version_is_told_from_a_torn_head() -> None:
    block = HEAD.encode()
    with pytest.raises(OtherVersion):
        SegmentHead.decode(block[:8] + struct.pack("<I", 2) + block[12:])


def test_a_head_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="is too long for the head"):
        replace(HEAD, layout="x" * HEAD_BYTES).encode()


@given(st.integers(1, 2048), st.integers(1, 1 << 22))
def test_pages_lie_behind_the_entries(num_pages: int, page_bytes: int) -> None:
    head = replace(HEAD, num_pages=num_pages, page_bytes=page_bytes)
    assert head.pages_offset % ALIGNMENT == 0
    assert 0 <= head.pages_offset - HEAD_BYTES - ENTRY_BYTES * num_pages < ALIGNMENT
    assert head.page_offset(num_pages - 1) + page_bytes == head.num_bytes


@given(st.lists(st.one_of(st.none(), ENTRIES), max_size=5))
def test_entries_are_read_as_written(entries: list[Entry | None]) -> None:
    table = b"".join(encode_entry("e", entry) if entry else bytes(ENTRY_BYTES) for entry in entries)
    expected = [(position, entry) for position, entry in enumerate(entries) if entry]
    assert decode_entries("e", table) == (expected, 0)
    assert decode_entries("e", table + b"x") == (expected, 0), "what a truncated file has left of an entry"
    assert decode_entries("another", table) == ([], len(expected))


@given(ENTRIES, st.integers(0, ENTRY_BYTES - 1), st.integers(1, 255))
def test_a_changed_entry_is_torn(entry: Entry, at: int, mask: int) -> None:
    encoded = bytearray(encode_entry("e", entry))
    encoded[at] ^= mask
    assert decode_entries("e", bytes(encoded)) == ([], 1)


def test_the_checksum_of_a_page_covers_its_key() -> None:
    content = memoryview(b"content")
    assert page_checksum(b"a" * 32, content) == page_checksum(b"a" * 32, content)
    assert page_checksum(b"a" * 32, content) != page_checksum(b"b" * 32, content)
    assert page_checksum(b"a" * 32, content) != page_checksum(b"a" * 32, memoryview(b"contenu"))


def test_long_namespaces_are_kept_as_digests() -> None:
    names = ["é" * 87, "é" * 88, "é" * 89]
    entries = [Entry(StoredPage(b"k" * 32, b"", b"i" * 8, name), 1) for name in names]
    table = b"".join(encode_entry("e", entry) for entry in entries)
    read, num_torn = decode_entries("e", table)
    found = [entry.page.namespace for _, entry in read]
    assert num_torn == 0 and found[0] == names[0] and len(set(found)) == 3 and len(found[1]) == 64


def test_keys_must_fit_an_entry() -> None:
    page = StoredPage(b"k" * 32, b"", b"i" * 8, "é" * 200)
    assert is_storable(page)
    assert is_storable(page._replace(parent=b"p" * 32))
    assert not is_storable(page._replace(key=b"k"))
    assert not is_storable(page._replace(parent=b"p"))
    assert not is_storable(page._replace(identity=b""))
