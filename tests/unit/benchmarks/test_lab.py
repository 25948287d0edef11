"""The lab: what its report says follows from the figures, and says the opposite where the figures are the opposite."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import reproduce_lab
from benchmarks.lab import findings
from benchmarks.lab.cache import steps
from benchmarks.lab.findings import Change
from benchmarks.lab.report import write_report
from benchmarks.lab.runs import answers, cached_share, gaps_before, phase_means, slim
from benchmarks.lab.sizes import DEFAULTS
from benchmarks.lab.starts import JOINING, PROCESSES, RAY, REST, engine_stages, gpu_memory, memory_of, start_stages
from tandem.bench.measures import distribution
from tandem.bench.results import make_result
from tandem.lifecycle import CRITICAL_PATH
from tests.unit.tandem.bench.records import record
from tests.unit.tandem.bench.test_results import a_run

QUEUED = {"prefill_queue": 60.0, "prefill": 10.0, "decode": 30.0, "e2e": 100.0}
DECODED = {"prefill_queue": 10.0, "prefill": 20.0, "decode": 170.0, "e2e": 200.0}


def a_result(label: str, ttft_s: float = 0.4, gap_s: float = 0.01, num: int = 4) -> dict[str, Any]:
    """Of requests with this TTFT, beside a stream with such gaps."""
    requests = [record([1 + ttft_s, 1 + ttft_s + gap_s], due_s=1.0, index=index) for index in range(num)]
    stream = record([0.5 + gap_s * index for index in range(round(3 / gap_s))], group="streams", error="cut")
    return make_result(*a_run(label=label, records=[*requests, stream]))


def a_burst(label: str, ttft_s: float, gap_s: float, phases: Mapping[str, float]) -> dict[str, Any]:
    result = slim(a_result(label, ttft_s, gap_s), keep=("series", "ttft"))
    return {"result": result, "quiet_itl": distribution([gap_s / 2]), "phases_ms": dict(phases)}


def a_step(ttft_s: float, cached_share: float, digests: list[str]) -> dict[str, Any]:
    return {
        "result": slim(a_result("step", ttft_s)),
        "phases_ms": dict(DECODED),
        "cached_share": cached_share,
        "answers": digests,
        "prompt_tokens": 6000,
    }


def an_account(violation: str = "", shipped: int = 0) -> dict[str, Any]:
    return {"prefill-0": {"violation": violation, "pages_shipped": shipped}}


@pytest.fixture
def results() -> dict[str, Any]:
    """Of a whole run, in which a worker for each job is better for streams and worse for prompts."""
    alone = {"result": slim(a_result("one at a time", 0.1, 0.010)), "phases_ms": QUEUED}
    many = {"result": slim(a_result("eight at a time", 0.3, 0.020)), "phases_ms": DECODED}
    same = ["a", "b"]
    start = {
        "ready_s": 10.5,
        "stages": {RAY: 3.0, PROCESSES: 4.0, "loading weights": 2.0, JOINING: 1.0},
        "engine": {},
        "gpu_gib": {"both-0": gpu_memory(GPU_LINE)},
        "rss_mib": {"both-0": {"rss": 900.0}},
        "rss_mib_after": {"both-0": {"rss": 1000.0, "anon": 700.0, "file": 100.0, "shmem": 200.0}},
    }
    sizes = DEFAULTS["cpu"]
    return {
        "command": "python -m benchmarks.reproduce_lab",
        "began": "2026-01-01 00:00 UTC",
        "seconds": 100.0,
        "machine": {"cores": "2", "load before the start": "0.10"},
        "versions": {"tandem": "0.1.0"},
        "device": "cpu",
        "model": "tiny",
        "load_format": "dummy",
        "page_size": 16,
        "sizes": {name: getattr(sizes, name) for name in sizes.__slots__},
        "burst": {
            "both/whole": a_burst("two of both", 0.4, 0.1, QUEUED),
            "1p1d/whole": a_burst("one of each", 0.8, 0.02, DECODED),
        },
        "concurrency": {"1p1d": {"1": alone, "8": many}},
        "cache": {
            "steps": {
                "cold": a_step(0.5, 0.0, same),
                "warm": a_step(0.05, 0.9, same),
                "own": a_step(0.9, 0.0, same),
                "shared": a_step(0.9, 0.8, same),
                "others": a_step(0.5, 0.0, same),
                "again": a_step(0.5, 0.0, same),
            },
            "accounts": {name: an_account() for name in ("begin", "cold", "warm", "own", "shared", "others", "again")},
            "num_pages": 256,
        },
        "starts": {"1p1d/whole": start},
        "failures": {},
    }


def test_a_change_is_a_gain_or_a_loss_by_what_it_is_of() -> None:
    less = Change("streams", "ITL p99", 0.089, 0.0124)
    assert str(less) == "ITL p99 falls from 89.0 ms to 12.4 ms (−86 %)" and less.is_gain
    more = Change("prompts", "TTFT p50", 0.1, 0.25)
    assert str(more) == "TTFT p50 rises from 100 ms to 250 ms (2.5 times)" and not more.is_gain
    rate = Change("the server", "the rate", 100.0, 150.0, findings.per_second, noise=0.0, less_is_better=False)
    assert str(rate) == "the rate rises from 100/s to 150/s (+50 %)" and rate.is_gain


@pytest.mark.parametrize("after", [0.095, 0.105])
def test_what_is_close_is_called_the_same_and_nobodys_gain(after: float) -> None:
    change = Change("streams", "ITL", 0.1, after)
    assert change.is_same and not change.is_gain and "stays about the same" in str(change)
    assert findings.balance([change]) == "Nobody gains and nobody pays by more than 10%."
    assert Change("streams", "ITL", 0.00001, 0.0004).is_same, "nobody sees a third of a millisecond"


def test_who_gains_and_who_pays_change_places_with_the_figures() -> None:
    less, more = Change("streams", "ITL", 0.1, 0.05), Change("prompts", "TTFT", 0.1, 0.2)
    assert findings.balance([less, more]) == "Gain: streams (ITL −50 %). Pay: prompts (TTFT 2.0 times)."
    less, more = Change("streams", "ITL", 0.05, 0.1), Change("prompts", "TTFT", 0.2, 0.1)
    assert findings.balance([less, more]) == "Gain: prompts (TTFT −50 %). Pay: streams (ITL 2.0 times)."
    same = Change("streams", "ITL", 0.1, 0.1)
    assert findings.balance([more, same]) == "Gain: prompts (TTFT −50 %). Nobody pays by more than 10%."
    # Of whom nothing was measured nothing is said.
    assert findings.balance([more]) == "Gain: prompts (TTFT −50 %). There are no figures of others."


def test_every_phase_of_the_critical_path_has_its_share_and_its_words() -> None:
    assert set(findings.PHASE_WORDS) == {spec.name for spec in CRITICAL_PATH}
    assert sum(findings.shares(QUEUED).values()) == pytest.approx(1)
    assert findings.bottleneck(QUEUED) == "prefill_queue" and findings.bottleneck(DECODED) == "decode"


def test_the_bottleneck_moves_only_where_it_does() -> None:
    moved = findings.bottleneck_moved(("with one", QUEUED), ("with two", DECODED))
    assert moved == (
        "The bottleneck moves: with one it is waiting for a prefill (60% of a request's 100 ms), with two it is "
        "decoding (85% of a request's 200 ms)."
    )
    assert findings.bottleneck_moved(("a", DECODED), ("b", DECODED)).startswith("The bottleneck stays where it is")
    near, nearer = {"prefill": 48.0, "decode": 50.0, "e2e": 98.0}, {"prefill": 50.0, "decode": 49.0, "e2e": 99.0}
    assert findings.bottleneck_moved(("a", near), ("b", nearer)).startswith("Two phases take about the same")
    assert findings.bottleneck_moved(("a", near), ("b", QUEUED)).startswith("The bottleneck moves")


def test_the_report_says_what_a_run_has_shown(results: dict[str, Any]) -> None:
    text = write_report(results, ["burst-itl"], "results.json")
    assert "For the running streams, ITL p50 falls from 100 ms to 20.0 ms (−80 %)" in text
    assert "For the burst's prompts, TTFT p50 rises from 400 ms to 800 ms (2.0 times)" in text
    assert "The bottleneck moves: with two of both it is waiting for a prefill" in text
    assert "the first prompts have been pushed out: 0% of them was found, 90% before" in text
    assert "2 of 2 warm and 2 of 2 again." in text and "All 7 checks of page accounts" in text
    assert "The longest stage of the start is processes and imports: 4.0 of 10.0 s (40%)." in text
    assert "the largest part is pages" in text
    assert "![burst-itl](burst-itl.png)" in text and "burst-ttft.png" not in text
    assert "not measured" not in text


def test_the_report_says_the_opposite_of_the_opposite(results: dict[str, Any]) -> None:
    burst = results["burst"]
    burst["both/whole"], burst["1p1d/whole"] = burst["1p1d/whole"], burst["both/whole"]
    cache = results["cache"]
    cache["steps"]["again"] = a_step(0.5, 0.9, ["a", "c"])
    cache["accounts"]["again"] = an_account("a page is lost")
    text = write_report(results, [], "results.json")
    assert "For the running streams, ITL p50 rises from 20.0 ms to 100 ms (5.0 times)" in text
    assert "For the burst's prompts, TTFT p50 falls from 800 ms to 400 ms (−50 %)" in text
    assert "the first prompts are still there: 90% of them was found" in text
    assert "1 of 2 again, so the cache has changed answers" in text
    assert "1 of 7 checks of page accounts found something wrong: prefill-0 after again: a page is lost." in text


def test_a_busy_machine_is_told_of(results: dict[str, Any]) -> None:
    assert "busy with other work" not in write_report(results, [], "results.json")
    results["machine"]["load before the start"] = "3.20"
    assert "its load was 3.2 before the start, with 2 cores" in write_report(results, [], "results.json")


def test_what_failed_is_named_and_the_rest_is_reported(results: dict[str, Any]) -> None:
    results |= {"burst": {}, "concurrency": {}, "cache": {}, "starts": {}, "failures": {"cache": "no time"}}
    text = write_report(results, [], "results.json")
    assert text.count("This was not measured") == 4 and "- cache: no time" in text


def test_a_report_is_drawn_of_what_was_measured_elsewhere(results: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench` has it")
    (tmp_path / "there.json").write_text(json.dumps(results))
    assert reproduce_lab.main(["--from", str(tmp_path / "there.json"), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "README.md").read_text()
    pictures = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert pictures == {f"{name}.png" for name in PICTURES} and all(f"]({name})" in text for name in pictures)
    again = reproduce_lab.read_results(tmp_path / "out" / "results.json")
    assert write_report(again, pictures, "results.json") == write_report(results, pictures, "results.json")
    results["failures"] = {"cache": "no time"}
    (tmp_path / "there.json").write_text(json.dumps(results))
    assert reproduce_lab.main(["--from", str(tmp_path / "there.json"), "--out", str(tmp_path / "out")]) == 1


PICTURES = ("burst-ttft", "burst-itl", "burst-phases", "concurrency-phases", "cache-ttft", "starts")


def test_figures_of_records() -> None:
    one = record([1.5], index=1, due_s=1.0, phases_ms={"prefill": 10.0}, output_digest="b", cached_tokens=5)
    other = record([1.2], index=0, due_s=1.0, phases_ms={"prefill": 20.0, "decode": 4.0}, output_digest="a")
    lost = record([], index=2, error="failed", phases_ms={"prefill": 500.0})
    assert phase_means([one, other, lost]) == {"prefill": 15.0, "decode": 2.0}
    assert answers([one, other]) == ["a", "b"] and cached_share([one, other]) == 0.25
    stream = record([0.1, 0.2, 0.4, 1.9], group="streams")
    quiet = gaps_before([one, stream], 1.0)
    assert quiet is not None and quiet["count"] == 2 and quiet["max"] == pytest.approx(0.2)


def test_results_keep_curves_where_they_are_drawn_and_no_secrets() -> None:
    result = a_result("one")
    assert "curve" not in json.dumps(slim(result)) and "config" not in slim(result)
    kept = slim(result, keep=("series", "ttft"))
    assert kept["requests"]["ttft"]["curve"] and "curve" not in kept["requests"]["itl"] and kept["series"]


def test_others_prompts_are_more_than_the_pools_hold() -> None:
    for sizes in DEFAULTS.values():
        [others] = [step for step in steps(sizes) if step.name == "others"]
        assert others.num_requests * sizes.cached_input > sizes.cache_pages * 16
        assert sizes.max_model_len <= sizes.cache_pages * 16, "a sequence must fit the pool"
        assert sizes.chunk < sizes.burst_input <= sizes.whole


LINES = """\
tandem 0.1.0: starting with the model m
   0.4 s  model: ready
   0.5 s  ray: starting
   2.6 s  ray: ready
   4.1 s  both-0: starting
   4.1 s  both-1: starting
   4.4 s  both-0: importing
   4.5 s  both-1: importing
   5.6 s  both-0: loading weights (0.11 of 0.54 GB)
   5.8 s  both-1: loading weights (0.00 of 0.54 GB)
   7.9 s  both-0: loading weights (0.52 of 0.54 GB), both-1: loading weights (0.51 of 0.54 GB)
   8.6 s  both-1: allocating pages
   9.7 s  both-0: loaded
   9.8 s  both-1: loaded
   9.9 s  both-1: ready
Ready after 10.0 s
""".splitlines()
ENGINE_LINE = "2026 tandem.engine.build INFO engine ready: loading weights 2.6 s, capturing CUDA graphs 1.0 s\n"
GPU_LINE = (
    "GPU memory in GiB: 139.8 in all, weights and workspaces 15.32, 54321 pages 106.10, CUDA graphs 1.25 (1.30 kept), "
    "largest forward 2.20, free 15.00"
)


def test_stages_of_a_start_are_those_of_the_worker_that_came_last_and_make_up_the_whole() -> None:
    engine = {name: engine_stages(ENGINE_LINE) for name in ("both-0", "both-1")}
    stages = start_stages(LINES, engine)
    assert stages["capturing CUDA graphs"] == 1.0 and sum(stages.values()) == pytest.approx(10.0)
    assert stages[RAY] == pytest.approx(2.1) and stages[PROCESSES] == pytest.approx(5.8 - 2.6)
    assert stages[REST] == pytest.approx(9.8 - 5.8 - 3.6) and stages[JOINING] == pytest.approx(0.2)
    assert start_stages(LINES[:5], engine) == {} and engine_stages("nothing") == {}


def test_memory_is_what_logs_and_kernel_say(tmp_path: Path) -> None:
    memory = gpu_memory(f"2026 tandem.engine.build INFO {GPU_LINE}\n")
    assert (memory["weights"], memory["pool"], memory["graphs"], memory["free"]) == (15.32, 106.1, 1.25, 15.0)
    assert gpu_memory("engine ready: loading weights 1.0 s") == {}
    (tmp_path / "status").write_text("Name:\tx\nVmRSS:\t 2048 kB\nRssAnon:\t 1024 kB\nRssShmem:\t 512 kB\n")
    assert memory_of(tmp_path / "status") == {"rss": 2.0, "anon": 1.0, "shmem": 0.5}
    assert memory_of(tmp_path / "gone") == {}
