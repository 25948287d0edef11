"""Identities of the prefixes of long prompts, without keeping the router's loop."""

import asyncio
from collections.abc import Sequence

from tandem.prefix import extend_identities

# So many pages take about a millisecond.
TURN_PAGES = 1024


async def prefix_identities_in_turns(token_ids: Sequence[int], page_size: int, namespace: str) -> list[int]:
    """As `prefix_identities`; others have their turn every millisecond."""
    identities: list[int] = []
    turn_tokens = TURN_PAGES * page_size
    for begin in range(0, len(token_ids), turn_tokens):
        if begin:
            await asyncio.sleep(0)
        # A turn looks at its own tokens alone: copies of all before would take longer with each.
        extend_identities(identities, token_ids[begin : begin + turn_tokens], page_size, namespace)
    return identities
