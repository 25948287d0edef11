"""Identities of the prefixes of long prompts."""

import asyncio

from router.long_prompts import TURN_PAGES, prefix_identities_in_turns
from tandem.prefix import prefix_identities


def test_others_have_their_turns_and_the_identities_are_the_same() -> None:
    async def scenario() -> None:
        num_turns = 0

        async def count() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(count())
        token_ids = range(4 * (3 * TURN_PAGES + 5) + 1)
        assert await prefix_identities_in_turns(token_ids, 4, "tenant") == prefix_identities(token_ids, 4, "tenant")
        assert num_turns >= 3
        assert await prefix_identities_in_turns(range(9), 4, "") == prefix_identities(range(9), 4, "")
        assert await prefix_identities_in_turns(range(3), 4, "") == []
        other.cancel()

    asyncio.run(scenario())
