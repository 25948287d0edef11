"""Identities of the prefixes of long prompts."""

import asyncio
from collections.abc import Sequence

from tandem.prefix import prefix_identities
from tandem.router.frontends.long_prompts import TURN_PAGES, prefix_identities_in_turns


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


class CountedPrompt(Sequence[int]):
    """Attributes: num_read: tokens copied out of it."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self.num_read = 0

    def __len__(self) -> int:
        return len(self._token_ids)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        part = self._token_ids[index]
        self.num_read += len(part) if isinstance(index, slice) else 1
        return part


def test_every_token_is_looked_at_in_one_turn_alone() -> None:
    """Copies of all earlier tokens would cost quadratic time."""
    prompt = CountedPrompt(range(4 * 20 * TURN_PAGES + 3))
    asyncio.run(prefix_identities_in_turns(prompt, 4, ""))
    assert prompt.num_read == len(prompt)
