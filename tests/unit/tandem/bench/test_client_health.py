"""Warnings about doubtful results."""

from dataclasses import replace
from typing import Any

import pytest

from tandem.bench.client_health import client_summary, warnings_about
from tandem.bench.clients.base import EndpointConfig, ServerDescription
from tandem.bench.config import BenchConfig, WorkloadConfig
from tandem.bench.processes import ClientUsage, RunResult
from tandem.bench.results import make_result
from tests.unit.tandem.bench.records import record

QUIET = ClientUsage(1.0, 10.0, [0.0] * 100)


def warnings(run: RunResult) -> str:
    result = make_result(BenchConfig(EndpointConfig("grpc://h:1")), run)
    assert result["warnings"] == warnings_about(result)
    return " ".join(result["warnings"])


def run_of(*records: Any, usages: tuple[ClientUsage, ...] = (QUIET,), is_whole: bool = True) -> RunResult:
    return RunResult(ServerDescription("m"), 0.0, list(records), list(usages), is_whole)


def test_a_quiet_run_has_no_warnings() -> None:
    assert warnings(run_of(record([1.0, 2.0]))) == ""


def test_late_requests_are_counted_and_warned_about() -> None:
    run = run_of(*(record([2.0], due_s=1.0, sent_s=1.0 + late) for late in (0.0, 0.004, 0.006, 0.5)))
    summary = client_summary(run)
    assert summary["num_late"] == 2 and summary["late_share"] == 0.5 and summary["lateness"]["max"] == 0.5
    said = warnings(run)
    assert "2 requests (50%) left more than 5 ms after they were due" in said
    assert "10% of a core on average, so either many are due at once" in said and "something else had" in said
    busy = ClientUsage(6.0, 10.0, [0.0] * 100)
    assert "the client did not keep up; try more --processes" in warnings(replace(run, usages=[busy]))


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (run_of(record([1.0]), usages=(QUIET, ClientUsage(9.0, 10.0, []))), "used 90% of a core"),
        (run_of(record([1.0]), usages=(ClientUsage(1, 10, [0.02] * 10),)), "timers fired at least 20 ms late"),
        (run_of(record([1.0]), is_whole=False), "was stopped before its end"),
        (run_of(record([1.0], counted_by="chunks")), "does not count tokens"),
        (run_of(record([1.0], counted_by="characters")), "--continuous-usage"),
        (run_of(record([1.0, 2.0], counts=[1, 3])), "2.00 tokens on average"),
        (run_of(record([1.0]), record([], error="timeout", detail="no end")), "1 requests: timeout (such as: no end)"),
    ],
)
def test_every_warning_has_its_text(run: RunResult, words: str) -> None:
    assert words in warnings(run)


def test_failed_streams_and_missing_counts_are_reported() -> None:
    stream = record([], group="streams", error="refused", detail="a full queue")
    assert "1 steady streams: refused (such as: a full queue)" in warnings(run_of(record([1.0]), stream))
    assert "1 whole answers had no output" in warnings(run_of(record([])))
    several = record([1.0, 2.0], counts=[2, 2], counted_by="usage")
    cut = record([1.0, 2.0], group="streams", error="cut", counted_by="chunks")
    assert "Streams were cut before the server had counted" in warnings(run_of(several, cut))
    assert "ended by their length" in warnings(run_of(record([1.0], counted_by="length")))


def test_repeated_prompts_are_reported() -> None:
    """A second run with the same seed measures the server's cache."""
    run = run_of(record([1.0], prompt_tokens=100, cached_tokens=96))
    assert "96% of the input tokens were in the server's cache" in warnings(run)
    common = BenchConfig(EndpointConfig("grpc://h:1"), WorkloadConfig(num_system_tokens=96))
    assert make_result(common, run)["warnings"] == []


def test_cached_chat_template_is_considered() -> None:
    run = run_of(record([1.0], prompt_tokens=100, cached_tokens=35))
    chats = BenchConfig(EndpointConfig("http://h:1/v1", api="chat"), WorkloadConfig(prompt_as="text"))
    (warning,) = make_result(chats, run)["warnings"]
    assert "the chat template begins them all with the same text" in warning
    assert "template" not in warnings(run)
