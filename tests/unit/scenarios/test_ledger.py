"""The time ledger of a request, from the workers to the client."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import pytest

from tandem.lifecycle import CRITICAL_PATH, ENDED, PHASES, RECEIVED, TOKENIZED, critical_path, now_ns
from tandem.messages import (
    Finished,
    FirstToken,
    GaveBack,
    Heartbeat,
    LinkState,
    Moment,
    Prefill,
    Progress,
    TokenEvent,
    Tokens,
)
from tandem.prefill_worker.config import PrefillConfig
from tandem.router.config import RouterConfig
from tandem.router.control_server import ControlServer
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.grpc import InferenceService
from tandem.router.router import Router
from tandem.rpc.channel import bind, new_server, open_channel
from tandem.rpc.credentials import ClusterCredentials
from tandem.rpc.prefix_feed import CacheAccount
from tandem.sampling_params import SamplingParams
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc, worker_pb2_grpc
from tandem.worker import control_client
from tandem.worker.adapter_exchange import AdapterExchange
from tandem.worker.control_client import ControlClient
from tandem.worker.events import FromRouter
from tandem.worker.records import RecordKeeper
from tests.fakes.link_ends import wait_until
from tests.fakes.router_harness import RouterHarness, run, settle, step_tokens
from tests.fakes.routing import FirstLeastLoaded
from tests.fakes.scripted_worker import ScriptedWorker, hello
from tests.fakes.tokenizer import ByteTokenizer
from tests.fakes.workers import WorkerPair

S = 10**9
# Phases of a request with one attempt.
CRITICAL = [spec.name for spec in CRITICAL_PATH if spec.name != "earlier_attempts"]
# Clock skew per worker, by its task.
SKEW_NS: ContextVar[int] = ContextVar("skew", default=0)


def skewed_ns() -> int:
    return now_ns() + SKEW_NS.get()


class SkewedWorker:
    """A worker with its own clock: a real stream with a timed script behind it.

    Attributes:
        at: true times of its moments, on the router's clock.
    """

    def __init__(self, router: Router, worker_id: str, role: str, skew_ns: int) -> None:
        self.router, self.worker_id, self.role, self._skew_ns = router, worker_id, role, skew_ns
        self.at: dict[str, int] = {}
        self.client: Any = None
        self.decode: SkewedWorker | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, address: str) -> None:
        SKEW_NS.set(self._skew_ns)
        self.client = ControlClient(
            address,
            hello(self.worker_id, self.role),
            credentials=ClusterCredentials("secret"),
            heartbeat=lambda: Heartbeat(1),
            heartbeat_interval_s=0.1,
            records=RecordKeeper(2**20),
            account=CacheAccount(),
            post=self._take,
            links=lambda: (),
            adapters=AdapterExchange(self._take),
            on_adapters=lambda *_: None,
            on_peers=lambda *_: None,
            on_connected=self._link,
            on_lost=lambda _: None,
        )
        await self.client.run()

    def stamp(self, name: str) -> Moment:
        self.at[name] = now_ns()
        return Moment(name, self.at[name] + self._skew_ns)

    def _link(self) -> None:
        if self.decode is not None:
            self.client.send([LinkState("d", "d-life", up=True)])

    def _take(self, event: Any) -> None:
        if isinstance(event, FromRouter) and isinstance(event.message, Prefill):
            self._tasks.add(asyncio.create_task(self._serve(event)))

    async def _serve(self, event: FromRouter) -> None:
        decode, message = self.decode, event.message
        assert decode is not None and isinstance(message, Prefill)
        key = (message.request_id, message.attempt)
        received = Moment("prefill_received", event.received_ns)
        self.at["prefill_received"] = event.received_ns - self._skew_ns
        await asyncio.sleep(0.02)
        started = self.stamp("prefill_started")
        await asyncio.sleep(0.03)
        first = self.stamp("first_token")
        self.client.send([FirstToken(*key, 0, 65, "", 0, 1, (received, started, first))])
        shipped = self.stamp("ship_started")
        await asyncio.sleep(0.01)
        moments = [decode.stamp("committed")]
        await asyncio.sleep(0.02)
        moments += [shipped, decode.stamp("decode_started"), decode.stamp("second_token")]
        tokens = (Progress(*key, tuple(moments)), Tokens((TokenEvent(*key, 0, (65, 66)),)))
        decode.client.send(tokens)
        await asyncio.sleep(0.02)
        decode.client.send([Tokens((TokenEvent(*key, 2, (67,)),))])
        decode.client.send([Finished(*key, "length", 3, 0, 1, (decode.stamp("last_token"),))])


@asynccontextmanager
async def skewed_cluster(prefill_ns: int, decode_ns: int) -> AsyncIterator[tuple[Router, SkewedWorker, str]]:
    """Run a router with a prefill and a decode worker, whose clocks are ahead by the given ns; yield its client
    address."""
    config = RouterConfig("nowhere", "fake", 400, cluster_token="secret")
    router = Router(config, FirstLeastLoaded())
    server = new_server()
    worker_pb2_grpc.add_ClusterServicer_to_server(ControlServer(router), server)
    frontend = Frontend(router, ByteTokenizer(), config)  # type: ignore[arg-type]
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(frontend), server)
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    p, d = SkewedWorker(router, "p", "prefill", prefill_ns), SkewedWorker(router, "d", "decode", decode_ns)
    p.decode = d
    tasks = [asyncio.create_task(w.run(address)) for w in (p, d)]
    try:
        await wait_until(lambda: not router.not_ready_reason())
        await wait_until(lambda: None not in (router.clocks.uncertainty_ns("p"), router.clocks.uncertainty_ns("d")))
        yield router, p, address
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop(None)
        frontend.close()


async def ask(address: str) -> pb.GenerateResponse:
    async with open_channel(address) as channel:
        request = pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(max_tokens=3))
        responses = [r async for r in inference_pb2_grpc.InferenceStub(channel).Generate(request)]
    return responses[-1]


@pytest.mark.parametrize(("prefill_ns", "decode_ns"), [(5 * S, -3 * S), (-3600 * S, 7 * S)])
def test_phases_are_true_though_clocks_are_seconds_apart(
    prefill_ns: int, decode_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_client, "now_ns", skewed_ns)

    @run
    async def scenario() -> None:
        async with skewed_cluster(prefill_ns, decode_ns) as (router, p, address):
            for worker_id, skew_ns in (("p", prefill_ns), ("d", decode_ns)):
                uncertainty_ns = router.clocks.uncertainty_ns(worker_id)
                assert uncertainty_ns is not None and uncertainty_ns < S
                assert abs(router.clocks.offset_ns(worker_id) - skew_ns) <= uncertainty_ns
            last = await ask(address)
        phases = {phase.name: phase for phase in last.phases}
        assert [phase.name for phase in last.phases if phase.on_critical_path] == CRITICAL
        critical_ms = sum(phase.duration_ms for phase in last.phases if phase.on_critical_path)
        assert critical_ms == pytest.approx(phases["e2e"].duration_ms, abs=1e-3)
        assert p.decode is not None
        at = {**p.at, **p.decode.at}
        # Either of the two clocks may be off by this much.
        slack_ms = 2 * last.clock_uncertainty_ms + 1e-3
        assert 0 < last.clock_uncertainty_ms < 1000
        for spec in PHASES:
            if spec.start in at and spec.end in at:
                true_ms = (at[spec.end] - at[spec.start]) / 1e6
                assert phases[spec.name].duration_ms == pytest.approx(true_ms, abs=slack_ms), spec.name
        waited_ms = (at["prefill_started"] - at["prefill_received"]) / 1e6
        told_ms = phases["prefill_queue"].duration_ms - phases["dispatch"].duration_ms
        assert told_ms == pytest.approx(waited_ms, abs=slack_ms)

    scenario()


class Asked:
    """A request at a router with scripted workers that share its clock."""

    def __init__(self, h: RouterHarness, **fields: Any) -> None:
        self._h = h
        self.client = h.request(**fields)
        self.tracker = self.client.tracker
        self.tracker.moments.update({RECEIVED: now_ns(), TOKENIZED: now_ns()})

    def prefilled(self, attempt: int = 0, finish_reason: str = "") -> None:
        moments = (Moment("prefill_started", now_ns()), Moment("first_token", now_ns()))
        index = len(self.tracker.output_ids)
        first = FirstToken(self.tracker.request_id, attempt, index, ord("a"), finish_reason, 0, 1, moments)
        self._h.p[0].say(first)

    def decoding(self, attempt: int = 0) -> None:
        self._h.d[0].say(Progress(self.tracker.request_id, attempt, (Moment("decode_started", now_ns()),)))

    async def ended(self) -> list[str]:
        """End the client if it is still there; return the request's phases."""
        await settle()
        await self.client.leave()
        phases, moments = critical_path(self.tracker.moments), self.tracker.moments
        assert sum(p.duration_ms for p in phases) == pytest.approx((moments[ENDED] - moments[RECEIVED]) / 1e6, abs=1e-3)
        assert phases[0].start_ms == 0 and min(p.duration_ms for p in phases) >= 0
        return [phase.name for phase in phases]


@run
async def test_request_that_ends_early_has_only_its_reached_phases() -> None:
    h = RouterHarness()
    queued, handed_over, decoding = (Asked(h) for _ in range(3))
    await settle()
    handed_over.prefilled()
    decoding.prefilled()
    decoding.decoding()
    assert await queued.ended() == ["tokenize", "assign", "prefill_queue"]
    assert await handed_over.ended() == ["tokenize", "assign", "prefill_queue", "prefill", "handover"]
    assert await decoding.ended() == ["tokenize", "assign", "prefill_queue", "prefill", "handover", "decode"]


def test_log_separates_sequential_from_overlapping_phases(caplog: pytest.LogCaptureFixture) -> None:
    @run
    async def scenario() -> None:
        asked = Asked(RouterHarness(), max_tokens=1)
        await settle()
        asked.prefilled(finish_reason="length")
        await asked.ended()

    with caplog.at_level(logging.INFO, "tandem.router.requests"):
        scenario()
    (line,) = [json.loads(record.message) for record in caplog.records if record.name == "tandem.router.requests"]
    assert list(line["phases_ms"]) == ["tokenize", "assign", "prefill_queue", "prefill", "finish"]
    assert sum(line["phases_ms"].values()) == pytest.approx(line["overlapping_ms"]["e2e"], abs=0.01)
    assert not line["phases_ms"].keys() & line["overlapping_ms"].keys()
    assert 0 <= line["clock_uncertainty_ms"] <= line["overlapping_ms"]["e2e"]


@run
async def test_request_ended_by_first_token_has_no_handover() -> None:
    asked = Asked(RouterHarness(), max_tokens=1)
    await settle()
    asked.prefilled(finish_reason="length")
    assert await asked.ended() == ["tokenize", "assign", "prefill_queue", "prefill", "finish"]


@run
async def test_a_stop_string_ends_decoding() -> None:
    h = RouterHarness()
    asked = Asked(h, stop_strings=("stop",))
    await settle()
    asked.prefilled()
    asked.decoding()
    h.d[0].say(step_tokens(asked.tracker.request_id, 0, 0, *b"astop"))
    await settle()
    assert asked.tracker.finish_reason == "stop"
    assert (await asked.ended())[-2:] == ["handover", "decode"]


@run
async def test_earlier_attempts_are_one_phase() -> None:
    h = RouterHarness()
    asked, left = Asked(h), Asked(h)
    await settle()
    for one in (asked, left):
        one.prefilled()
        one.decoding()
        h.d[0].say(GaveBack(one.tracker.request_id, 0))
    assert await left.ended() == ["tokenize", "assign", "earlier_attempts", "prefill_queue"]
    asked.prefilled(1)
    asked.decoding(1)
    started = now_ns()
    h.d[0].say(step_tokens(asked.tracker.request_id, 1, 1, *b"bcde"))
    h.d[0].say(Finished(asked.tracker.request_id, 1, "length", 5, 0, 1, (Moment("last_token", now_ns()),)))
    phases = await asked.ended()
    assert phases == ["tokenize", "assign", "earlier_attempts", *CRITICAL[2:]]
    assert asked.tracker.moments["last_token"] >= started


@run
async def test_waiting_for_workers_counts_in_the_next_phase() -> None:
    h = RouterHarness(0, 0)
    asked, left = Asked(h), Asked(h)
    await settle()
    assert await left.ended() == ["tokenize", "assign"]
    both = ScriptedWorker(h.router, "b", "both")
    await settle()
    moments = asked.tracker.moments
    assert moments[TOKENIZED] < moments["waiting"] < moments["assigned"]
    h.router.lose_worker(both.worker, "disconnected", "killed")
    assert await asked.ended() == ["tokenize", "assign", "earlier_attempts"]


@run
async def test_complete_resumed_request_has_no_worker_phases() -> None:
    asked = Asked(RouterHarness(), max_tokens=2, output_ids=(97, 98))
    assert await asked.ended() == ["tokenize", "assign", "finish"]


def told(messages: list[Any]) -> dict[str, int]:
    """Return the moments reported to a router; none may repeat."""
    moments = [moment for m in messages if isinstance(m, FirstToken | Progress | Finished) for moment in m.moments]
    assert len({moment.name for moment in moments}) == len(moments)
    return {moment.name: moment.time_ns for moment in moments}


def test_workers_tell_their_moments_in_order() -> None:
    pair = WorkerPair()
    pair.submit("r", list(range(9)), max_tokens=3)
    pair.run()
    p, d = told(pair.p.outbox.router), told(pair.d.outbox.router)
    assert set(p) == {"prefill_started", "first_token"}
    order = ["lease_granted", "ship_started", "committed", "decode_started", "second_token", "last_token"]
    assert set(d) == set(order)
    assert p["prefill_started"] <= d["lease_granted"] and p["first_token"] <= d["ship_started"]
    assert [d[name] for name in order] == sorted(d.values())
    (last,) = pair.d.outbox.of(Finished)
    assert [moment.name for moment in last.moments] == ["last_token"]


def test_pages_of_a_long_prompt_are_shipped_while_it_is_computed() -> None:
    pair = WorkerPair(prefill={"config": PrefillConfig(4, min_shared_tokens=4)})
    pair.submit("r", list(range(20)), max_tokens=3)
    pair.p.scheduler.step()
    (progress,) = pair.p.outbox.of(Progress)
    assert [moment.name for moment in progress.moments] == ["prefill_started"]
    pair.run()
    assert pair.p.outbox.of(Progress) == [progress]
    (first,) = pair.p.outbox.of(FirstToken)
    at = {moment.name: moment.time_ns for moment in first.moments}
    assert progress.moments[0].time_ns == at["prefill_started"] <= told(pair.d.outbox.router)["ship_started"]
    assert told(pair.d.outbox.router)["ship_started"] < at["first_token"]


def test_pages_cached_on_both_sides_are_not_shipped() -> None:
    pair = WorkerPair()
    for request_id in ("first", "again"):
        pair.submit(request_id, list(range(8)), max_tokens=2)
        pair.run()
        shipped = "ship_started" in told(
            [m for m in pair.d.outbox.router if getattr(m, "request_id", "") == request_id]
        )
        assert shipped == (request_id == "first")


def test_worker_reports_arrival_time() -> None:
    pair = WorkerPair()
    received = now_ns()
    pair.p.scheduler.receive(FromRouter(Prefill("r", 0, (1, 2, 3), (), SamplingParams(4), "d"), received))
    pair.p.scheduler.step()
    assert told(pair.p.outbox.router)["prefill_received"] == received
