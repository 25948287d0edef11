"""Identities of the prefixes of long prompts, computed without blocking the loop."""

import asyncio
from collections.abc import Sequence

from tandem.prefix import extend_identities

# Pages per turn; they take about a millisecond.
TURN_PAGES = 1024


async def prefix_identities_in_turns(token_ids: Sequence[int], page_size: int, namespace: str) -> list[int]:
    """Like `prefix_identities`, but yields to the loop every millisecond."""
    identities: list[int] = []
    turn_tokens = TURN_PAGES * page_size
    for begin in range(0, len(token_ids), turn_tokens):
        if begin:
            await asyncio.sleep(0)
        # Pass each turn its own tokens only, to avoid copies of all before.
        extend_identities(identities, token_ids[begin : begin + turn_tokens], page_size, namespace)
    return identities
