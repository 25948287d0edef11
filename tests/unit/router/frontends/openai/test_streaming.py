"""Several generations at once, and clients that leave."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from tandem.messages import Failed, Finished
from tandem.router.errors import UnavailableError
from tandem.router.frontends.access import Access
from tandem.router.frontends.generation import Generation
from tandem.router.frontends.openai import streaming
from tandem.router.frontends.openai.streaming import (
    ClientGoneError,
    Event,
    EventStream,
    pieces_of,
    unless_client_leaves,
)
from tandem.router.text.output_text import OutputText
from tests.fakes.request_spec import request_spec
from tests.fakes.router_harness import RouterHarness, first_token, run, settle
from tests.fakes.tokenizer import ByteTokenizer


def generations(h: RouterHarness, count: int) -> list[Generation]:
    trackers = [h.router.make_tracker(request_spec((1, 2))) for _ in range(count)]
    return [Generation(h.router, Access((), 0), t, OutputText(ByteTokenizer(), (), ())) for t in trackers]  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 3])
def test_each_piece_comes_with_the_index_of_its_generation(count: int) -> None:
    @run
    async def scenario() -> None:
        h = RouterHarness()
        found = generations(h, count)
        texts, reasons = [""] * count, [""] * count

        async def read() -> None:
            async for index, piece in pieces_of(found):
                texts[index] += piece.text
                reasons[index] += piece.finish_reason

        reader = asyncio.create_task(read())
        await settle()
        for index, generation in enumerate(found):
            request_id = generation.tracker.request_id
            h.p[0].say(first_token(request_id, 0, 0, ord("a") + index))
            h.d[0].say(Finished(request_id, 0, "length", 1, 0, 1))
        await reader
        assert texts == list("abc"[:count]) and reasons == ["length"] * count
        assert h.router.num_requests == 0

    scenario()


@run
async def test_the_failure_of_one_ends_all() -> None:
    h = RouterHarness()
    found = generations(h, 3)

    async def read() -> None:
        async for _ in pieces_of(found):
            pass

    reader = asyncio.create_task(read())
    await settle()
    for attempt in range(3):  # max_attempts of the harness
        h.p[0].say(Failed(found[1].tracker.request_id, attempt, "no luck"))
        await settle()
    with pytest.raises(UnavailableError, match="given up after 3 failed attempts"):
        await reader
    assert h.router.num_requests == 0


@run
async def test_work_ends_with_its_client() -> None:
    leaves = asyncio.Event()

    async def receive() -> Any:
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def work() -> str:
        return "done"

    assert await unless_client_leaves(receive, work()) == "done"
    ended = asyncio.Event()

    async def endless() -> None:
        try:
            await asyncio.Future()
        finally:
            ended.set()

    waiting = asyncio.create_task(unless_client_leaves(receive, endless()))
    await settle()
    leaves.set()
    with pytest.raises(ClientGoneError):
        await waiting
    assert ended.is_set()


# --- silence ---


class SlowClient:
    """A client that reads while `takes` is set, and stays connected."""

    def __init__(self) -> None:
        self.takes = asyncio.Event()
        self.takes.set()
        self.bodies: list[bytes] = []
        self.num_sending = 0

    async def send(self, message: Any) -> None:
        self.num_sending += 1
        assert self.num_sending == 1, "two parts of an answer on their way at once"
        try:
            await self.takes.wait()
            self.bodies.append(message.get("body", b""))
        finally:
            self.num_sending -= 1

    async def receive(self) -> Any:
        await asyncio.Future()


async def events_of(queue: "asyncio.Queue[str]") -> AsyncGenerator[Event]:
    while text := await queue.get():
        yield "", f'{{"text":"{text}"}}'


async def begin(client: SlowClient, queue: "asyncio.Queue[str]") -> "asyncio.Task[None]":
    """Begins a stream whose client takes only the first event."""
    answering = asyncio.create_task(
        EventStream(events_of(queue), ("", '{"text":"a"}'))({}, client.receive, client.send)
    )
    await settle()
    client.takes.clear()
    return answering


def test_an_event_waits_for_the_comment_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEPALIVE_S", 0.05)

    @run
    async def scenario() -> None:
        client, queue = SlowClient(), asyncio.Queue[str]()
        answering = await begin(client, queue)
        await asyncio.sleep(0.12)
        assert client.num_sending == 1, "a comment is on its way"
        queue.put_nowait("b")
        await asyncio.sleep(0.1)
        client.takes.set()
        queue.put_nowait("")
        await answering
        assert b"".join(client.bodies) == b'data: {"text":"a"}\n\n:\ndata: {"text":"b"}\n\ndata: [DONE]\n\n'

    scenario()


def test_a_client_that_takes_no_comment_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEPALIVE_S", 0.05)
    monkeypatch.setattr(streaming, "READ_TIMEOUT_S", 0.2)

    @run
    async def scenario() -> None:
        client, queue = SlowClient(), asyncio.Queue[str]()
        answering = await begin(client, queue)
        await asyncio.wait_for(answering, 2.0)
        await settle()
        assert client.num_sending == 0 and len(asyncio.all_tasks()) == 1

    scenario()
