"""Long lists as JSON, written without blocking the loop."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tandem.router.frontends.openai.streaming import to_json

# About a millisecond.
PIECE_ITEMS = 2048


async def list_text(token_ids: Sequence[int], of: Callable[[int], Any] = int) -> str:
    """Args: of: an item for each token."""
    pieces = []
    for start in range(0, len(token_ids), PIECE_ITEMS):
        pieces.append(to_json([of(token_id) for token_id in token_ids[start : start + PIECE_ITEMS]])[1:-1])
        await asyncio.sleep(0)
    return f"[{','.join(pieces)}]"
