"""Identities of prompt prefixes, for those who compare prompts without comparing tokens.

An identity stands for everything up to the end of a page. It is an 8-byte BLAKE2b digest of the one before it and the
page's token ids, 4 bytes each, little-endian like the identity itself; before the first page stands the digest of the
namespace in UTF-8. So it is equal where prefixes are, in every process and on every machine, and processes can tell
each other what they have.

Two may be equal by accident. They decide who waits for whom and who serves whom, never which page is reused.
"""

import struct
import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

IDENTITY_BYTES = 8
TOKEN_BYTES = 4


def namespace_identity(namespace: str) -> bytes:
    """What stands before the first page of every prefix in a namespace."""
    return blake2b(namespace.encode(), digest_size=IDENTITY_BYTES).digest()


def page_identity(before: bytes, token_ids: Sequence[int]) -> bytes:
    """The identity up to the end of a page. Args: before: up to its beginning; token_ids: those of the page."""
    page = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return blake2b(before + page, digest_size=IDENTITY_BYTES).digest()


def prefix_identities(token_ids: Sequence[int], page_size: int, namespace: str, known: Sequence[int] = ()) -> list[int]:
    """The identities of all full pages, in order, as unsigned integers.

    Args:
        known: those of its first pages, as far as somebody has computed them.
    """
    identities = list(known)
    extend_identities(identities, token_ids[len(known) * page_size :], page_size, namespace)
    return identities


def extend_identities(identities: list[int], token_ids: Sequence[int], page_size: int, namespace: str) -> None:
    """Puts the identities of further full pages behind those of the pages before them, which takes time for the further
    ones alone.

    Args:
        identities: of all pages before.
        token_ids: those that follow.
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
    """Identities that stand one behind the other, as unsigned integers. Raises ValueError: these are none."""
    identities = array("Q")
    identities.frombytes(packed)
    if sys.byteorder == "big":
        identities.byteswap()
    return identities
