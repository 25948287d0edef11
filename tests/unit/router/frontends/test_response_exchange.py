"""Lookup of responses between routers, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from tandem.router.errors import InvalidRequestError, OverloadedError, UnavailableError
from tandem.router.frontends import response_exchange
from tandem.router.frontends.kept_responses import KeptResponse, KeptResponses
from tandem.router.frontends.response_exchange import CONVERSATION, MAX_CONVERSATION_BYTES, ResponseExchange
from tandem.rpc.auth import cluster_auth
from tandem.rpc.channel import bind, new_server
from tandem.rpc.credentials import ClusterCredentials
from tandem.v1 import router_pb2_grpc
from tests.fakes.clock import FakeClock

TOKEN = "the-token"
KEY = "digest"


@asynccontextmanager
async def two_routers(token: str = TOKEN) -> AsyncIterator[tuple[ResponseExchange, ResponseExchange, grpc.aio.Server]]:
    """Yields two routers and the second one's server. Args: token: the first router's."""
    server = new_server([cluster_auth(TOKEN)])
    address = bind(server, "127.0.0.1", 0)
    first = ResponseExchange("r0", {"r1": address}, KeptResponses(FakeClock()), ClusterCredentials(token))
    second = ResponseExchange("r1", {}, KeptResponses(FakeClock()), ClusterCredentials(TOKEN))
    router_pb2_grpc.add_RouterResponsesServicer_to_server(second, server)
    await server.start()
    try:
        yield first, second, server
    finally:
        await server.stop(grace=0.0)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20.0):
            await scenario()

    asyncio.run(bounded())


def keep(exchange: ResponseExchange, response_id: str, text: bytes, previous: Any = None) -> None:
    exchange.kept.keep(
        response_id, KEY, answer=b"{%s}" % text, input_items=text, output_items=text.upper(), previous=previous
    )


def test_a_response_is_found_where_its_id_says() -> None:
    async def scenario() -> None:
        async with two_routers() as (first, second, _):
            one, two = second.new_id(), second.new_id()
            keep(second, one, b"a")
            keep(second, two, b"b", second.kept.find(one, KEY))
            found = await first.find(two, KEY, with_earlier=True)
            assert found is not None and found.answer == b"{b}"
            assert [(turn.input_items, turn.output_items) for turn in found.turns()] == [(b"a", b"A"), (b"b", b"B")]
            alone = await first.find(two, KEY, with_earlier=False)
            assert alone is not None and len(alone.turns()) == 1
            assert await first.find(two, "another key's", with_earlier=True) is None
            assert await first.find(first.new_id(), KEY, with_earlier=True) is None
            assert await first.find("", KEY, with_earlier=True) is None
            # A continued conversation is kept here, all of it.
            three = first.new_id()
            keep(first, three, b"c", found)
            assert not await first.forget(two, "another key's")
            assert await first.forget(two, KEY) and not await first.forget(two, KEY)
            again = await first.find(three, KEY, with_earlier=True)
            assert again is not None and len(again.turns()) == 3
            assert first.kept.num_responses == 1
            await first.forget(three, KEY)
            assert first.kept.num_bytes == 0

    run(scenario)


def test_a_response_in_progress_is_found_and_cancelled_from_elsewhere() -> None:
    async def scenario() -> None:
        async with two_routers() as (first, second, _):
            response_id = second.new_id()

            async def work() -> None:
                try:
                    await asyncio.Future()
                finally:
                    keep(second, response_id, b"cancelled")

            def look() -> KeptResponse:
                return KeptResponse(response_id, KEY, 0.0, b"{running}", b"a", b"[]", None)

            second.background.start(response_id, KEY, look, work())
            await asyncio.sleep(0)
            found = await first.find(response_id, KEY, with_earlier=False)
            assert found is not None and found.answer == b"{running}"
            with pytest.raises(InvalidRequestError, match="is in progress: wait for its end"):
                await first.find(response_id, KEY, with_earlier=True)
            assert await first.cancel(response_id, "another key's") is None
            assert len(second.background) == 1
            cancelled = await first.cancel(response_id, KEY)
            assert cancelled is not None and cancelled.answer == b"{cancelled}"
            assert len(second.background) == 0
            assert await first.forget(response_id, KEY)
            assert await first.cancel(response_id, KEY) is None

    run(scenario)


def test_a_conversation_is_changed_from_elsewhere() -> None:
    async def scenario() -> None:
        async with two_routers() as (first, second, _):
            name = second.new_id(CONVERSATION)
            keep(second, name, b"")
            assert await first.extend(name, KEY, input_items=b"[1]", output_items=b"[2]")
            assert await first.change(name, KEY, b"{new}")
            assert await second.extend(name, KEY, input_items=b"[3]", output_items=b"[4]")
            for exchange in (first, second):
                found = await exchange.find(name, KEY, with_earlier=True)
                assert found is not None and found.answer == b"{new}"
                turns = [(turn.input_items, turn.output_items) for turn in found.turns()]
                assert turns == [(b"[1]", b"[2]"), (b"[3]", b"[4]"), (b"", b"")]
            assert not await first.extend(name, "another key's", input_items=b"", output_items=b"")
            assert not await first.change(name, "another key's", b"{theirs}")
            assert await first.forget(name, KEY)
            assert second.kept.num_bytes == 0

    run(scenario)


def test_a_router_that_is_gone_is_no_unknown_response() -> None:
    async def scenario() -> None:
        async with two_routers() as (first, second, server):
            response_id = second.new_id()
            await server.stop(grace=0.0)
            with pytest.raises(UnavailableError, match="does not answer"):
                await first.find(response_id, KEY, with_earlier=True)
            with pytest.raises(UnavailableError, match="does not answer"):
                await first.forget(response_id, KEY)

    run(scenario)


def test_strangers_are_told_nothing() -> None:
    async def scenario() -> None:
        async with two_routers("a wrong one") as (first, second, _):
            response_id = second.new_id()
            keep(second, response_id, b"a")
            with pytest.raises(UnavailableError):
                await first.find(response_id, KEY, with_earlier=True)

    run(scenario)


def test_no_more_are_asked_for_at_once_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_exchange, "WAIT_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        async with two_routers() as (first, second, _):
            response_id = second.new_id()
            keep(second, response_id, b"a")
            first._slots = asyncio.Semaphore(0)
            with pytest.raises(OverloadedError):
                await first.find(response_id, KEY, with_earlier=True)
            first._slots.release()
            # A slot is given back even without an answer.
            for _ in range(3):
                assert await first.find(response_id, KEY, with_earlier=True)

    run(scenario)


def test_a_conversation_that_is_too_long_is_not_sent() -> None:
    async def scenario() -> None:
        async with two_routers() as (first, second, _):
            one, two, here = second.new_id(), second.new_id(), first.new_id()
            half = b"x" * (MAX_CONVERSATION_BYTES // 4)
            keep(second, one, half)
            keep(second, two, half + b"x", second.kept.find(one, KEY))
            keep(first, here, 3 * half)
            found = await first.find(one, KEY, with_earlier=True)
            assert found is not None and found.num_conversation_bytes == 2 * len(half)
            for response_id in (two, here):
                with pytest.raises(InvalidRequestError, match="at most 8388608 are taken: begin a new one") as refused:
                    await first.find(response_id, KEY, with_earlier=True)
                assert refused.value.param == "previous_response_id"
                # It can still be looked at.
                assert await first.find(response_id, KEY, with_earlier=False) is not None

    run(scenario)


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_conversation_has_a_limit_of_turns(monkeypatch: pytest.MonkeyPatch, is_elsewhere: bool) -> None:
    monkeypatch.setattr(response_exchange, "MAX_TURNS", 3)

    async def scenario() -> None:
        async with two_routers() as (first, second, _):
            name = second.new_id(CONVERSATION)
            keep(second, name, b"")
            asked = first if is_elsewhere else second
            for _ in range(3):
                assert await asked.extend(name, KEY, input_items=b"[]", output_items=b"[]")
            with pytest.raises(InvalidRequestError, match="has 3 turns, and can have no more: begin a new one"):
                await asked.extend(name, KEY, input_items=b"[]", output_items=b"[]")
            assert await asked.change(name, KEY, b"{}")

    run(scenario)
