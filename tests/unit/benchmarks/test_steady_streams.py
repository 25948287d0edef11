"""The benchmark of steady streams: figures, cleanup and time limits."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks import served, steady_streams
from benchmarks.router_model import fit_to_serve
from benchmarks.served import Served, StartError, within
from tandem.bench.results import make_result
from tests.unit.tandem.bench.records import record
from tests.unit.tandem.bench.test_results import a_run


def test_headlines_show_stream_gaps_and_ttft() -> None:
    stream = record([0.1, 0.2, 0.5, 0.6], group="streams", error="cut")
    result = make_result(*a_run(label="one", records=[record([0.4, 0.9], due_s=0.15), stream]))
    figures = steady_streams.headline(result, 12.34)
    assert figures["itl_of_streams_ms"]["max"] == pytest.approx(300)
    assert figures["ttft_of_prompts_ms"]["p50"] == pytest.approx(250)
    assert (figures["num_prompts"], figures["num_whole"], figures["start_to_ready_s"]) == (1, 1, 12.3)


def test_both_clusters_get_the_same_load() -> None:
    sizes = steady_streams.DEFAULTS["cuda"]
    one, other = (steady_streams.bench_config(address, "label", sizes, 8000) for address in ("a:1", "b:2"))
    assert (one.workload, one.arrivals, one.duration_s) == (other.workload, other.arrivals, other.duration_s)
    assert one.workload.num_streams == 64 and one.workload.input_lengths.low == 4096
    burst = steady_streams.bench_config("a:1", "label", replace(sizes, num_burst=50), 8000)
    assert burst.arrivals is not None
    assert (burst.arrivals.kind, burst.arrivals.burst_size, burst.workload.num_requests) == ("burst", 50, 50)
    assert steady_streams.warmup_config("a:1", sizes, 8000).workload.seed != one.workload.seed


def test_timeout_interrupts_nested_waits() -> None:
    with pytest.raises(TimeoutError, match="inner"), within(5, "outer"), within(0.01, "inner"):
        time.sleep(5)
    with pytest.raises(TimeoutError, match="outer"), within(0.1, "outer"):
        with within(0.05, "inner"):
            pass
        time.sleep(5)
    with pytest.raises(TimeoutError), within(0.05, "outer"), within(5, "inner"):
        time.sleep(5)


def test_failed_start_shows_the_last_log_lines(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="which model"):
        Served([], tmp_path, start_timeout_s=30.0)


def test_slow_start_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = []
    started = served.subprocess.Popen
    monkeypatch.setattr(
        served.subprocess, "Popen", lambda *given, **more: processes.append(started(*given, **more)) or processes[0]
    )
    with pytest.raises(StartError, match="did not start in time"):
        Served(["--model", str(tmp_path)], tmp_path, start_timeout_s=0.0)
    assert processes[0].poll() is not None


def test_a_model_without_a_tokenizer_is_served_with_one_of_its_size(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 3000}')
    fit = Path(fit_to_serve(str(model), tmp_path / "fit"))
    tokenizer = Tokenizer.from_file(str(fit / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 3000 and tokenizer.decode([2999]).strip()
    assert (fit / "config.json").read_text() == (model / "config.json").read_text()
    assert fit_to_serve(str(fit), tmp_path / "other") == str(fit)
    assert fit_to_serve("smollm2-135m-instruct", tmp_path / "other") == "smollm2-135m-instruct"


def test_results_of_an_earlier_run_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise StartError("no memory")

    monkeypatch.setattr(steady_streams, "run_layout", fails)
    old = [tmp_path / name for name in ("both.json", "1p1d.json", "1p1d.jsonl", "1p1d.txt")]
    others = tmp_path / "other.json"
    for file in (*old, others):
        file.write_text("{}")
    assert steady_streams.main(["--out", str(tmp_path)]) == 1
    assert others.exists() and not any(file.exists() for file in old)
