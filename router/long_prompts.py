"""Identities of the prefixes of long prompts, without keeping the router's loop."""

import asyncio
from collections.abc import Sequence

from tandem.prefix import prefix_identities

# So many pages take about a millisecond.
TURN_PAGES = 1024


async def prefix_identities_in_turns(token_ids: Sequence[int], page_size: int, namespace: str) -> list[int]:
    """As `prefix_identities`; others have their turn every millisecond."""
    identities: list[int] = []
    for end in range(TURN_PAGES * page_size, len(token_ids), TURN_PAGES * page_size):
        identities = prefix_identities(token_ids[:end], page_size, namespace, identities)
        await asyncio.sleep(0)
    return prefix_identities(token_ids, page_size, namespace, identities)
