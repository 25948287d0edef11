"""Identities of prompt prefixes, for those who compare prompts without comparing tokens."""

from collections.abc import Sequence


def prefix_identities(token_ids: Sequence[int], page_size: int, namespace: str) -> list[int]:
    """Chained hashes, one for each full page, of everything up to the page's end: equal where prefixes are.

    Two may be equal by accident. They decide who waits for whom and who serves whom, never which page is reused. They
    are comparable within one process only.
    """
    identities = []
    identity = hash(namespace)
    for start in range(0, len(token_ids) // page_size * page_size, page_size):
        identity = hash((identity, *token_ids[start : start + page_size]))
        identities.append(identity)
    return identities
