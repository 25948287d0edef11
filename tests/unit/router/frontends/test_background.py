"""Responses in progress that no client waits for."""

import asyncio

import pytest

from tandem.router.errors import OverloadedError
from tandem.router.frontends.background import BackgroundResponses
from tandem.router.frontends.kept_responses import KeptResponse


def look() -> KeptResponse:
    return KeptResponse("a", "key", 0.0, b"{}", b"[]", b"[]", None)


def test_there_is_a_limit_of_runs_and_closing_ends_all() -> None:
    async def scenario() -> None:
        runs = BackgroundResponses(max_runs=2)
        ended = []

        async def work(name: str) -> None:
            try:
                await asyncio.Future()
            finally:
                ended.append(name)

        for name in ("a", "b"):
            runs.check_room()
            runs.start(name, "key", look, work(name))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="2 responses are in progress"):
            runs.check_room()
        assert runs.find("a", "key") is not None and runs.find("a", "another key") is None
        await runs.cancel("a", "another key")
        assert len(runs) == 2
        await runs.cancel("a", "key")
        runs.check_room()
        await runs.close()
        assert ended == ["a", "b"] and len(runs) == 0

    asyncio.run(scenario())
