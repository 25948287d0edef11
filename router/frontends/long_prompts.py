"""Identities of the prefixes of long prompts, computed without blocking the loop."""

import asyncio
from collections.abc import Sequence

from tandem.prefix import extend_identities

# About a millisecond.
TURN_PAGES = 1024


async def prefix_identities_in_turns(token_ids: Sequence[int], page_size: int, namespace: str) -> list[int]:
    identities: list[int] = []
    turn_tokens = TURN_PAGES * page_size
    for begin in range(0, len(token_ids), turn_tokens):
        if begin:
            await asyncio.sleep(0)
        # Pass only this turn's tokens: all earlier ones would be copied again.
        extend_identities(identities, token_ids[begin : begin + turn_tokens], page_size, namespace)
    return identities
