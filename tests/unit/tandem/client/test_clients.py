"""Both clients against scripted routers, over real gRPC."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from tandem.client import AsyncTandemClient, TandemClient, TandemError, make_request
from tandem.client import progress as progress_module
from tandem.client.progress import StreamProgress
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc
from tests.fakes.clock import FakeClock


class Broken:
    """gRPC's error for a broken connection."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def trailing_metadata(self) -> None:
        return None


OUTPUT = [10, 11, 12, 13, 14, 15]


class ScriptedRouter(inference_pb2_grpc.InferenceServicer):
    """Serves OUTPUT, one token per message, from any point of resumption.

    Attributes:
        breaks_after: messages after which each stream breaks, or None.
        own_error: status that ends each call.
        requests, embed_requests: all received requests.
    """

    def __init__(self, cluster: list["ScriptedRouter"], name: str) -> None:
        self.breaks_after: int | None = None
        self.own_error = False
        self.requests: list[pb.GenerateRequest] = []
        self.embed_requests: list[pb.EmbedRequest] = []
        self._cluster, self._name = cluster, name
        self._port = 0
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        # A break stops the whole server, like a router's death.
        self._server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait(5.0)

    def GetServerInfo(self, request: Any, context: Any) -> pb.ServerInfo:
        return pb.ServerInfo(routers=[pb.RouterStatus(grpc_address=router.address) for router in self._cluster])

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        if self.own_error:
            context.set_trailing_metadata((("tandem-router", self._name),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "no worker")
        start = len(request.resume.token_ids)
        assert list(request.resume.token_ids) == OUTPUT[:start]
        assert request.resume.num_characters == start
        assert request.resume.proof == (f"proof of {start}".encode() if start else b"")
        for number, index in enumerate(range(start, len(OUTPUT))):
            if number == self.breaks_after:
                threading.Thread(target=self.stop).start()
                time.sleep(5.0)
            yield pb.GenerateResponse(
                index=index,
                token_ids=[OUTPUT[index]],
                text="x",
                resume_token=f"token of {self._name}".encode() if index == start else b"",
                resume_proof=f"proof of {index + 1}".encode(),
            )
        yield pb.GenerateResponse(index=len(OUTPUT), finish_reason=pb.FINISH_REASON_LENGTH)

    def Embed(self, request: pb.EmbedRequest, context: Any) -> Iterator[pb.EmbedResponse]:
        """Embed an input as its length, the last input first."""
        self.embed_requests.append(request)
        if self.own_error:
            context.set_trailing_metadata((("tandem-router", self._name),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "no worker")
        for number, (index, one) in enumerate(reversed(list(enumerate(request.inputs)))):
            if number == self.breaks_after:
                threading.Thread(target=self.stop).start()
                time.sleep(5.0)
            length = len(one.text) or len(one.token_ids.ids)
            yield pb.EmbedResponse(index=index, values=[length], usage=pb.Usage(prompt_tokens=length))


@pytest.fixture
def routers() -> Iterator[list[ScriptedRouter]]:
    found: list[ScriptedRouter] = []
    found += [ScriptedRouter(found, name) for name in ("r0", "r1", "r2")]
    yield found
    for router in found:
        router.stop()


def threaded(address: str, count: int, timeout_s: float | None) -> list[list[pb.GenerateResponse]]:
    with TandemClient(address) as client:
        return [list(client.generate(make_request([1, 2]), timeout_s)) for _ in range(count)]


def with_asyncio(address: str, count: int, timeout_s: float | None) -> list[list[pb.GenerateResponse]]:
    async def run() -> list[list[pb.GenerateResponse]]:
        async with AsyncTandemClient(address) as client:
            return [[r async for r in client.generate(make_request([1, 2]), timeout_s)] for _ in range(count)]

    return asyncio.run(run())


@pytest.fixture(params=[threaded, with_asyncio], ids=["threads", "asyncio"])
def call(request: pytest.FixtureRequest) -> Callable[..., list[list[pb.GenerateResponse]]]:
    """Sends requests one after the other and returns the responses to each."""

    def send(address: str, count: int = 1, timeout_s: float | None = None) -> list[list[pb.GenerateResponse]]:
        return request.param(address, count, timeout_s)

    return send


def assert_whole(responses: list[pb.GenerateResponse]) -> None:
    assert [i for r in responses for i in r.token_ids] == OUTPUT
    assert "".join(r.text for r in responses) == "x" * len(OUTPUT)
    assert [r.index for r in responses] == list(range(len(OUTPUT) + 1))
    assert responses[-1].finish_reason == pb.FINISH_REASON_LENGTH


def test_calls_are_spread_over_all_routers(routers: list[ScriptedRouter], call: Any) -> None:
    for responses in call(routers[0].address, count=9):
        assert_whole(responses)
    assert [len(router.requests) for router in routers] == [3, 3, 3]


def test_a_client_may_stay_with_one(routers: list[ScriptedRouter]) -> None:
    with TandemClient(routers[1].address, one_router=True) as client:
        for _ in range(4):
            assert_whole(list(client.generate(make_request([1]))))
        assert [len(router.requests) for router in routers] == [0, 4, 0]
        routers[1].breaks_after = 2
        with pytest.raises(TandemError):
            list(client.generate(make_request([1])))


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_stream_goes_on_at_another_router(routers: list[ScriptedRouter], call: Any, after: int) -> None:
    routers[0].breaks_after = after
    for responses in call(routers[1].address, count=6):
        assert_whole(responses)
    broken = [r for router in routers[1:] for r in router.requests if r.HasField("resume")]
    assert len(broken) == (1 if after else 0)
    for request in broken:
        assert request.resume.token == b"token of r0" and list(request.token_ids.ids) == [1, 2]


def test_stream_survives_a_second_router_death(routers: list[ScriptedRouter], call: Any) -> None:
    routers[0].breaks_after = routers[1].breaks_after = 2
    for responses in call(routers[2].address, count=5):
        assert_whole(responses)


def test_stream_resumes_at_the_only_router(call: Any) -> None:
    alone: list[ScriptedRouter] = []
    alone.append(ScriptedRouter(alone, "r0"))
    alone[0].breaks_after = 3

    def start_again() -> None:
        while len(alone[0].requests) < 1:
            time.sleep(0.01)
        time.sleep(1.0)
        alone[0].breaks_after = None
        alone[0].start()

    starter = threading.Thread(target=start_again)
    starter.start()
    (responses,) = call(alone[0].address)
    starter.join()
    alone[0].stop()
    assert_whole(responses)
    assert len(alone[0].requests) == 2


def test_router_error_is_final(routers: list[ScriptedRouter], call: Any) -> None:
    for router in routers:
        router.own_error = True
    with pytest.raises(TandemError, match="no worker"):
        call(routers[0].address)
    assert sum(len(router.requests) for router in routers) == 1


def test_retries_are_limited(routers: list[ScriptedRouter], call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "GO_ON_WITHIN_S", 1.0)
    for router in routers:
        router.breaks_after = 1
    began = time.monotonic()
    with pytest.raises(TandemError) as ended:
        call(routers[0].address)
    assert ended.value.code == "UNAVAILABLE" and time.monotonic() - began < 8.0


def test_the_time_to_go_on_counts_from_when_a_stream_breaks() -> None:
    clock = FakeClock()
    progress = StreamProgress(make_request([1]), None, clock)
    broken = Broken()
    clock.advance(10 * progress_module.GO_ON_WITHIN_S)
    assert progress.goes_on_after(broken)
    clock.advance(progress_module.GO_ON_WITHIN_S - 1)
    assert progress.goes_on_after(broken)
    progress.add(pb.GenerateResponse(token_ids=[1], resume_token=b"t"))
    clock.advance(100.0)
    assert progress.goes_on_after(broken)
    clock.advance(progress_module.GO_ON_WITHIN_S + 1)
    assert not progress.goes_on_after(broken)


def test_missing_cluster_is_reported_at_once(routers: list[ScriptedRouter], call: Any) -> None:
    for router in routers:
        router.stop()
    began = time.monotonic()
    with pytest.raises(TandemError, match="no cluster answers at"):
        call(routers[0].address)
    assert time.monotonic() - began < 3.0


def test_silent_port_respects_the_call_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with TandemClient(address) as client, futures.ThreadPoolExecutor(4) as threads:
            calls = [threads.submit(list, client.generate(make_request([1]), 1.0)) for _ in range(4)]
            for call in calls:
                with pytest.raises(TandemError):
                    call.result(10.0)
        assert time.monotonic() - began < 4.0


def embed_threaded(address: str, inputs: Any, **options: Any) -> list[pb.EmbedResponse]:
    with TandemClient(address) as client:
        return client.embed(inputs, **options)


def embed_with_asyncio(address: str, inputs: Any, **options: Any) -> list[pb.EmbedResponse]:
    async def run() -> list[pb.EmbedResponse]:
        async with AsyncTandemClient(address) as client:
            return await client.embed(inputs, **options)

    return asyncio.run(run())


@pytest.fixture(params=[embed_threaded, embed_with_asyncio], ids=["threads", "asyncio"])
def embed(request: pytest.FixtureRequest) -> Callable[..., list[pb.EmbedResponse]]:
    return request.param


@pytest.mark.parametrize(
    ("inputs", "lengths"),
    [("four", [4]), (["one", "three"], [3, 5]), ([7, 8], [2]), ([[7], [7, 8, 9]], [1, 3]), ([], [])],
)
def test_embeddings_come_in_the_order_of_their_inputs(
    routers: list[ScriptedRouter], embed: Any, inputs: Any, lengths: list[int]
) -> None:
    responses = embed(routers[0].address, inputs)
    assert [list(r.values) for r in responses] == [[length] for length in lengths]
    assert [r.index for r in responses] == list(range(len(lengths)))


def test_options_of_embeddings_are_sent(routers: list[ScriptedRouter], embed: Any) -> None:
    embed(routers[0].address, "x")
    embed(routers[0].address, "x", normalize=False, dimensions=8, truncate_prompt_tokens=-1, keep_last_tokens=True)
    plain, full = [request for router in routers for request in router.embed_requests]
    if not plain.normalize:
        plain, full = full, plain
    assert plain == pb.EmbedRequest(inputs=[pb.EmbedInput(text="x")], normalize=True)
    assert full == pb.EmbedRequest(
        inputs=[pb.EmbedInput(text="x")],
        normalize=False,
        dimensions=8,
        truncate_prompt_tokens=-1,
        keep_last_tokens=True,
    )


@pytest.mark.parametrize("after", [0, 1, 3])
def test_embeddings_go_on_at_another_router(routers: list[ScriptedRouter], embed: Any, after: int) -> None:
    routers[0].breaks_after = routers[1].breaks_after = after
    responses = embed(routers[2].address, ["a", "ab", "abc", "abcd"])
    assert [list(r.values) for r in responses] == [[1], [2], [3], [4]]
    # What is here is not asked for again.
    sizes = [len(request.inputs) for router in routers for request in router.embed_requests]
    assert sorted(sizes, reverse=True)[0] == 4 and sum(sizes) <= 4 + 2 * (4 - after)


def test_a_routers_error_ends_embeddings(routers: list[ScriptedRouter], embed: Any) -> None:
    for router in routers:
        router.own_error = True
    with pytest.raises(TandemError, match="no worker"):
        embed(routers[0].address, ["a", "b"])
    assert sum(len(router.embed_requests) for router in routers) == 1
