"""Identities of prompt prefixes, for those who compare prompts without comparing tokens."""

import struct
from collections.abc import Sequence
from hashlib import blake2b

IDENTITY_BYTES = 8
TOKEN_BYTES = 4


def prefix_identities(token_ids: Sequence[int], page_size: int, namespace: str) -> list[int]:
    """Chained hashes, one for each full page, of everything up to the page's end: equal where prefixes are, in every
    process and on every machine, so that processes can tell each other what they have.

    Two may be equal by accident. They decide who waits for whom and who serves whom, never which page is reused.

    An identity is an 8-byte BLAKE2b digest of the one before it and the page's token ids, 4 bytes each, little-endian
    like the identity itself; before the first page stands the digest of the namespace in UTF-8.
    """
    num_tokens = len(token_ids) // page_size * page_size
    pages = struct.pack(f"<{num_tokens}I", *token_ids[:num_tokens])
    identities = []
    identity = blake2b(namespace.encode(), digest_size=IDENTITY_BYTES).digest()
    for start in range(0, len(pages), page_size * TOKEN_BYTES):
        identity = blake2b(
            identity + pages[start : start + page_size * TOKEN_BYTES], digest_size=IDENTITY_BYTES
        ).digest()
        identities.append(int.from_bytes(identity, "little"))
    return identities
