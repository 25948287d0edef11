"""Identities of prompt prefixes, equal in every process and on every machine.

A page's identity covers everything up to its end: an 8-byte BLAKE2b digest of the previous identity and the page's
token ids (4 bytes each, little-endian). The digest of the namespace in UTF-8 precedes the first page.

Identities may collide. They decide which worker serves a request, never which page is reused.
"""

import struct
import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

IDENTITY_BYTES = 8
TOKEN_BYTES = 4
# Precedes an adapter's hash. No namespace of a client holds it.
ADAPTER_MARK = "\0"


def adapted_namespace(namespace: str, content_hash: str) -> str:
    """Return the namespace of pages computed with an adapter, by its content; "" for none."""
    return f"{namespace}{ADAPTER_MARK}{content_hash}" if content_hash else namespace


def split_namespace(namespace: str) -> tuple[str, str]:
    """Return the parts of `adapted_namespace`: the namespace without the adapter, and the adapter's content hash."""
    base, _, content_hash = namespace.partition(ADAPTER_MARK)
    return base, content_hash


def owner_of(namespace: str) -> str:
    """Return the part of a cache namespace that is of one client: the API key's digest, or the name of a namespace
    without one, up to its first "/"."""
    return namespace.partition("/")[0]


def namespace_identity(namespace: str) -> bytes:
    return blake2b(namespace.encode(), digest_size=IDENTITY_BYTES).digest()


def page_identity(before: bytes, token_ids: Sequence[int]) -> bytes:
    page = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return blake2b(before + page, digest_size=IDENTITY_BYTES).digest()


def prefix_identities(token_ids: Sequence[int], page_size: int, namespace: str, known: Sequence[int] = ()) -> list[int]:
    """Return the identities of all full pages as unsigned integers. Args: known: those of the first pages."""
    identities = list(known)
    extend_identities(identities, token_ids[len(known) * page_size :], page_size, namespace)
    return identities


def extend_identities(identities: list[int], token_ids: Sequence[int], page_size: int, namespace: str) -> None:
    """Append the identities of further full pages; the cost depends on the new pages only.

    Args:
        identities: identities of all previous pages.
        token_ids: the tokens after those pages.
    """
    end = len(token_ids) // page_size * page_size
    pages = struct.pack(f"<{end}I", *token_ids[:end])
    identity = identities[-1].to_bytes(IDENTITY_BYTES, "little") if identities else namespace_identity(namespace)
    for start in range(0, len(pages), page_size * TOKEN_BYTES):
        identity = blake2b(
            identity + pages[start : start + page_size * TOKEN_BYTES], digest_size=IDENTITY_BYTES
        ).digest()
        identities.append(int.from_bytes(identity, "little"))


def unpack_identities(packed: bytes) -> "array[int]":
    """Unpack concatenated identities into unsigned integers. Raises ValueError for other lengths."""
    identities = array("Q")
    identities.frombytes(packed)
    if sys.byteorder == "big":
        identities.byteswap()
    return identities
