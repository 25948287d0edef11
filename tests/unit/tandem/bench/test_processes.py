"""Whole runs by client processes, against a server that reports its own times."""

import multiprocessing
import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from tandem.bench.clients.base import EndpointConfig, EndpointError
from tandem.bench.goodput import Slo
from tandem.bench.measures import RequestMeasures, percentile
from tandem.bench.processes import RunResult, run_processes
from tandem.bench.records import RequestRecord
from tandem.bench.runner import Progress, RunnerConfig
from tandem.bench.workloads.base import Session
from tandem.bench.workloads.prompts import PromptAs, PromptMaker
from tandem.bench.workloads.synthetic import Lengths, Synthetic
from tests.unit.tandem.bench.conftest import Scripted, ScriptedServers
from tests.unit.tandem.bench.scripted_server import Script

NUM_TOKENS = 12
# For the lower quartile: other load delays some values, the tool itself all of them.
TOLERANCE_S = 0.001
NUM_TRIES = 3
# Timers of an idle loop are a millisecond late.
BUSY_LAG_S = 0.003
SCRIPT = Script(ttft_s=0.03, gaps_s=(0.005, 0.005, 0.012))


def sessions(num: int, prompt_as: PromptAs = "ids", num_tokens: int = NUM_TOKENS) -> list[Session]:
    lengths = Lengths(num_tokens, num_tokens)
    return Synthetic(PromptMaker(0, prompt_as), 0, num, Lengths(16, 16), lengths).sessions()


def endpoint_of(server: Scripted, kind: str) -> EndpointConfig:
    if kind == "grpc":
        return EndpointConfig(server.grpc)
    return EndpointConfig(server.http, api="chat" if kind == "chat" else "completions")


def off(measured: list[float], true: list[float]) -> float:
    """Return the lower quartile of the differences."""
    return statistics.quantiles((abs(a - b) for a, b in zip(measured, true, strict=True)), n=4)[0]


@pytest.mark.parametrize("kind", ["grpc", "completions", "chat"])
def test_measures_match_the_server_within_a_millisecond(scripted: ScriptedServers, kind: str) -> None:
    server = scripted(SCRIPT)
    prompt_as: PromptAs = "text" if kind == "chat" else "ids"
    for _ in range(NUM_TRIES):
        server.sent()
        result = run_processes(endpoint_of(server, kind), RunnerConfig(), sessions(9, prompt_as), 1)
        sent = server.sent()
        assert len(sent) == len(result.records) == 9
        assert all(not record.error and record.num_output_tokens == NUM_TOKENS for record in result.records)
        # One clock: no chunk arrives before it was sent.
        assert all(
            result.started_at + seen >= was
            for record, (_, times) in zip(result.records, sent, strict=True)
            for seen, was in zip(record.times, times, strict=True)
        )
        apart = differences(result, sent)
        if max(apart.values()) < TOLERANCE_S:
            return
    lags = sorted(lag for usage in result.usages for lag in usage.lags_s)
    if percentile(lags, 75) > BUSY_LAG_S:
        pytest.skip("the machine is too busy for times of a millisecond, as the client itself has noticed")
    assert max(apart.values()) < TOLERANCE_S, apart


def differences(result: RunResult, sent: list[tuple[float, list[float]]]) -> dict[str, float]:
    """Return each measure's difference from the server's own. Requests are sequential, so their order is the same."""
    measures = [RequestMeasures.of(record) for record in result.records]
    left = [result.started_at + record.sent_s for record in result.records]
    gaps = [[b - a for a, b in pairwise(times)] for _, times in sent]
    return {
        "ttft": off(
            [one.ttft or 0.0 for one in measures], [ts[0] - at for (_, ts), at in zip(sent, left, strict=True)]
        ),
        "itl": off([gap for one in measures for gap in one.gaps], [gap for of_one in gaps for gap in of_one]),
        "itl_p95": off([one.itl_p95 or 0.0 for one in measures], [percentile(sorted(one), 95) for one in gaps]),
        "tpot": off([one.tpot or 0.0 for one in measures], [sum(one) / (NUM_TOKENS - 1) for one in gaps]),
    }


@pytest.mark.parametrize("kind", ["grpc", "completions"])
def test_goodput_matches_the_script(scripted: ScriptedServers, kind: str) -> None:
    endpoint = endpoint_of(scripted(SCRIPT), kind)
    for _ in range(NUM_TRIES):
        records = run_processes(endpoint, RunnerConfig(), sessions(5), 1).records
        # The script takes 30 ms to the first token and 76 ms from there to the last.
        assert num_good(records, "ttft=29ms") == num_good(records, "e2e=105ms") == 0
        assert num_good(records, "ttft=1s,tpot=1s,itl_p95=1s,e2e=5s") == 5
        # A stalled client sees all waiting tokens at once, without gaps.
        if not any(num_good(records, limits) for limits in ("tpot=200us", "itl_max=2ms", "ttft=1s,itl_max=2ms")):
            return
    pytest.fail("gaps of 5 ms were good by a limit of 2 ms")


def num_good(records: Sequence[RequestRecord], limits: str) -> int:
    return sum(Slo.parse(limits).is_good(record) for record in records)


def test_several_processes_are_put_together_exactly(scripted: ScriptedServers) -> None:
    server = scripted(SCRIPT)
    both = sessions(9)
    for number, session in enumerate(both):
        session.due_s = number * 0.02
    result = run_processes(EndpointConfig(server.grpc), RunnerConfig(), both, 2)
    assert sorted(record.index for record in result.records) == list(range(9))
    assert len(result.usages) == 2 and all(usage.cpu_s > 0 for usage in result.usages)
    by_index = sorted(result.records, key=lambda record: record.index)
    assert [record.due_s for record in by_index] == [number * 0.02 for number in range(9)]
    came = sorted(received for received, _ in server.sent())
    left = sorted(result.started_at + record.sent_s for record in result.records)
    assert statistics.median(abs(a - b) for a, b in zip(came, left, strict=True)) < 0.02


def test_more_is_told_than_a_pipe_holds(scripted: ScriptedServers) -> None:
    server = scripted(Script(ttft_s=0.0, gaps_s=(0.0,), is_exact=False))
    result = run_processes(EndpointConfig(server.http), RunnerConfig(), sessions(3, num_tokens=9000), 1)
    assert [len(record.times) for record in result.records] == [9000] * 3
    assert [len(times) for _, times in server.sent()] == [9000] * 3


def test_there_are_no_more_processes_than_requests_in_hand(scripted: ScriptedServers) -> None:
    result = run_processes(EndpointConfig(scripted(SCRIPT).grpc), RunnerConfig(concurrency=3), sessions(7), 2)
    begun = [(record.sent_s, 1) for record in result.records] + [(record.ended_s, -1) for record in result.records]
    assert max(accumulate(change for _, change in sorted(begun))) == 3
    assert len(result.usages) == 2
    assert len(run_processes(EndpointConfig(scripted(SCRIPT).grpc), RunnerConfig(1), sessions(2), 4).usages) == 1


@pytest.mark.parametrize("scheme", ["grpc://{}", "http://{}/v1"])
def test_unreachable_server_is_reported(scheme: str) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = scheme.format(f"127.0.0.1:{bound.getsockname()[1]}")
        with pytest.raises(EndpointError, match="answers at"):
            run_processes(EndpointConfig(url), RunnerConfig(), sessions(1), 1)


@pytest.mark.parametrize("scheme", ["grpc://{}", "http://{}/v1"])
def test_silent_server_times_out(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = EndpointConfig(scheme.format(f"127.0.0.1:{silent.getsockname()[1]}"), connect_timeout_s=0.3)
        with pytest.raises(EndpointError, match="in time"):
            run_processes(endpoint, RunnerConfig(), sessions(1), 1)


def test_ctrl_c_keeps_measurements(scripted: ScriptedServers) -> None:
    server = scripted(SCRIPT)
    ended = threading.Event()
    runs: list[RunResult] = []

    def on_progress(_: float, progress: list[Progress]) -> None:
        if getattr(progress[0], "num_ended", 0) and not ended.is_set():
            ended.set()
            os.kill(os.getpid(), signal.SIGINT)

    began = time.monotonic()
    runs.append(run_processes(EndpointConfig(server.grpc), RunnerConfig(2), sessions(2000), 1, on_progress))
    assert time.monotonic() - began < 20
    [result] = runs
    whole: list[RequestRecord] = [record for record in result.records if not record.error]
    assert not result.is_whole and whole and len(result.records) < 2000
    assert {record.error for record in result.records} <= {"", "cut"}


def test_dead_process_is_noticed(scripted: ScriptedServers) -> None:
    def kill_it(*_: object) -> None:
        for child in multiprocessing.active_children():
            if child.pid not in before:
                child.kill()

    server = scripted(SCRIPT)
    before = {child.pid for child in multiprocessing.active_children()}
    with pytest.raises(RuntimeError, match="has died of SIGKILL"):
        run_processes(EndpointConfig(server.grpc), RunnerConfig(), sessions(500), 1, kill_it)


def test_client_process_ignores_ctrl_c_from_its_start(scripted: ScriptedServers) -> None:
    """It reaches the whole group, even while the processes import modules."""
    blocked: set[bool] = set()

    def look(*_: object) -> None:
        for child in multiprocessing.active_children():
            if child.pid not in before:
                status = Path(f"/proc/{child.pid}/status").read_text()
                [mask] = [line.split()[1] for line in status.splitlines() if line.startswith("SigBlk")]
                blocked.add(bool(int(mask, 16) & 1 << (signal.SIGINT - 1)))

    server = scripted(SCRIPT)
    before = {child.pid for child in multiprocessing.active_children()}
    run_processes(EndpointConfig(server.grpc), RunnerConfig(), sessions(10), 1, look)
    assert blocked == {True}
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
