import asyncio

import pytest

from tandem.rpc.calls import call_errors
from tests.fakes.router_harness import run


@run
async def test_only_a_cancelled_call_is_an_error() -> None:
    with pytest.raises(ConnectionError, match="the call was cancelled"), call_errors():
        raise asyncio.CancelledError

    async def dial() -> None:
        with call_errors():
            await asyncio.sleep(10.0)

    task = asyncio.create_task(dial())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
