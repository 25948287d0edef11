import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest

from tandem.messages import PROTOCOL_VERSION, Heartbeat, Peers, Welcome
from tandem.router import control_server
from tandem.router.config import RouterConfig
from tandem.router.control_server import ControlServer
from tandem.router.policies.least_loaded import LeastLoaded
from tandem.router.router import Router
from tandem.rpc.codec import ROUTER_CODEC, WORKER_CODEC
from tests.fakes.router_harness import run, settle
from tests.fakes.scripted_worker import PAGE_FORMAT, hello


class Refused(Exception):
    pass


class Context:
    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Refused(code.name, details)


class ControlStream:
    """The worker's end of a control stream."""

    def __init__(self, router: Router) -> None:
        self._batches: asyncio.Queue[Any] = asyncio.Queue()
        self._responses = ControlServer(router).Control(self._requests(), Context())

    def say(self, *messages: Any) -> None:
        self._batches.put_nowait(WORKER_CODEC.encode(messages))

    def end(self) -> None:
        self._batches.put_nowait(None)

    async def next(self) -> Sequence[Any]:
        return ROUTER_CODEC.decode(await anext(self._responses))

    async def close(self) -> None:
        await self._responses.aclose()  # type: ignore[attr-defined]

    async def _requests(self) -> AsyncIterator[Any]:
        while (batch := await self._batches.get()) is not None:
            yield batch


def new_router() -> Router:
    return Router(RouterConfig("nowhere", "fake", 400), LeastLoaded())


@run
async def test_a_worker_is_here_as_long_as_its_stream() -> None:
    router = new_router()
    stream = ControlStream(router)
    stream.say(hello("p0", "prefill"), Heartbeat(7))
    welcome, *_, peers = await stream.next()
    assert isinstance(welcome, Welcome) and isinstance(peers, Peers)
    await settle()
    (worker,) = router.workers
    assert (worker.worker_id, worker.num_steps) == ("p0", 7)
    stream.end()
    with pytest.raises(StopAsyncIteration):
        await stream.next()
    assert not list(router.workers)


@run
async def test_the_worker_goes_with_the_call() -> None:
    router = new_router()
    stream = ControlStream(router)
    stream.say(hello("p0", "prefill"))
    await stream.next()
    await stream.close()
    assert not list(router.workers)


@pytest.mark.parametrize(
    ("first", "code", "message"),
    [
        (Heartbeat(1), "INVALID_ARGUMENT", "the first message of a worker must be Hello"),
        (
            replace(hello("p0", "prefill"), protocol_version=PROTOCOL_VERSION + 1),
            "FAILED_PRECONDITION",
            f"protocol version {PROTOCOL_VERSION + 1} is not the router's {PROTOCOL_VERSION}",
        ),
        (
            hello("p0", "prefill", page_format=replace(PAGE_FORMAT, model_fingerprint="other")),
            "FAILED_PRECONDITION",
            "models differ: this worker has loaded other",
        ),
    ],
)
def test_who_cannot_be_part_of_the_cluster_is_told_why(first: Any, code: str, message: str) -> None:
    @run
    async def scenario() -> None:
        router = new_router()
        router.connect_worker(hello("d0", "decode"), lambda _: None, lambda _: None)
        stream = ControlStream(router)
        stream.say(first)
        with pytest.raises(Refused) as refused:
            await stream.next()
        assert refused.value.args[0] == code and message in refused.value.args[1]
        assert [worker.worker_id for worker in router.workers] == ["d0"]

    scenario()


def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "HELLO_TIMEOUT_S", 0.05)

    @run
    async def scenario() -> None:
        with pytest.raises(Refused, match="the first message of a worker must be Hello"):
            await ControlStream(new_router()).next()

    scenario()
