"""Keys of stored pages: what was computed, with what, for whom.

A key is a 32-byte BLAKE2b digest of the previous key and the page's token ids, so it covers the whole prefix. The first
page continues a root: the digest of model, page format, adapter and namespace, each preceded by its length.

Unlike the identities of routing (tandem.prefix), equal keys are taken as equal pages.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

from tandem.messages import PageFormat

KEY_BYTES = 32


def root_key(page_format: PageFormat, namespace: str, adapter: str = "") -> bytes:
    """
    Args:
        page_format: its fingerprint covers weights and scales, its layout the dtype and shape of pages.
        adapter: fingerprint of the adapter's weights; "" without one.
    """
    fields = (page_format.model_fingerprint, page_format.layout, str(page_format.page_bytes), adapter, namespace)
    digest = blake2b(digest_size=KEY_BYTES)
    for field in fields:
        encoded = field.encode()
        digest.update(struct.pack("<Q", len(encoded)))
        digest.update(encoded)
    return digest.digest()


def page_key(before: bytes, token_ids: Sequence[int]) -> bytes:
    """Returns the key of the page with these tokens behind the page (or root) of `before`."""
    return blake2b(before + struct.pack(f"<{len(token_ids)}I", *token_ids), digest_size=KEY_BYTES).digest()


def page_keys(before: bytes, token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """Returns the keys of all full pages of `token_ids`, which continue `before`."""
    keys = []
    for start in range(0, len(token_ids) // page_size * page_size, page_size):
        before = page_key(before, token_ids[start : start + page_size])
        keys.append(before)
    return keys
