import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from tandem.messages import (
    PROTOCOL_VERSION,
    CachedPrefixes,
    CacheWasReset,
    RepeatPrefixes,
    ResetCache,
    StoreBeat,
    StoreJoin,
    Welcome,
)
from tandem.router import store_reports
from tandem.router.config import RouterConfig
from tandem.router.policies.base import RoutingPolicy
from tandem.router.policies.least_cost import LeastCost
from tandem.router.policies.least_loaded import LeastLoaded
from tandem.router.router import Router
from tandem.router.store_reports import StoreReports
from tandem.rpc.codec import ROUTER_CODEC, STORE_REPORT_CODEC
from tests.fakes.router_harness import run, settle

JOIN = StoreJoin(PROTOCOL_VERSION, "store-0", "life", "host")
PAGE = (5).to_bytes(8, "little")


class Refused(Exception):
    pass


class Context:
    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Refused(code.name, details)


class Stream:
    """The store's end of a stream of reports."""

    def __init__(self, router: Router) -> None:
        self._batches: asyncio.Queue[Any] = asyncio.Queue()
        self._responses = StoreReports(router).Report(self._requests(), Context())

    def say(self, *messages: Any) -> None:
        self._batches.put_nowait(STORE_REPORT_CODEC.encode(messages))

    def end(self) -> None:
        self._batches.put_nowait(None)

    async def next(self) -> list[Any]:
        return ROUTER_CODEC.decode(await anext(self._responses))

    async def _requests(self) -> AsyncIterator[Any]:
        while (batch := await self._batches.get()) is not None:
            yield batch


def new_router(policy: RoutingPolicy | None = None) -> Router:
    return Router(RouterConfig("nowhere", "fake", 400), policy or LeastCost())


@run
async def test_a_store_is_known_as_long_as_its_stream() -> None:
    router = new_router()
    node = router.stores.node("host")
    stream = Stream(router)
    stream.say(JOIN, CachedPrefixes(0, True, PAGE))
    assert await stream.next() == [Welcome(router.incarnation, True)]
    await settle()
    assert node.prefixes is not None and node.prefixes.holds(5)
    stream.say(CachedPrefixes(2, False, PAGE), StoreBeat())
    assert await stream.next() == [RepeatPrefixes()]
    stream.end()
    with pytest.raises(StopAsyncIteration):
        await stream.next()
    assert node.prefixes is None


@run
async def test_a_reset_without_workers_purges_a_store_that_comes_back() -> None:
    router = new_router()
    assert router.reset_caches() == 0
    for message in (CacheWasReset(1), StoreBeat()):
        stream = Stream(router)
        stream.say(JOIN, message)
        answers = await stream.next()
        assert (ResetCache(1) in answers) == isinstance(message, CacheWasReset)
        await settle()
        stream.end()


@run
async def test_policies_without_prefixes_ask_for_none() -> None:
    stream = Stream(router := new_router(LeastLoaded()))
    stream.say(JOIN)
    assert await stream.next() == [Welcome(router.incarnation, False)]


@run
async def test_a_bad_report_ends_the_stream() -> None:
    stream = Stream(router := new_router())
    stream.say(JOIN, CachedPrefixes(0, True, b"torn"))
    await stream.next()
    with pytest.raises(StopAsyncIteration):
        await stream.next()
    assert not list(router.stores)


@run
async def test_strangers_are_refused() -> None:
    for message in (StoreBeat(), replace(JOIN, protocol_version=PROTOCOL_VERSION + 1), None):
        stream = Stream(router := new_router())
        if message is not None:
            stream.say(message)
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(Refused, match=r"must be StoreJoin|protocol version"),
        ):
            patch.setattr(store_reports, "JOIN_TIMEOUT_S", 0.05)
            await stream.next()
        assert not list(router.stores)
