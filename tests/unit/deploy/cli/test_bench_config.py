"""The flags of `tandem bench` as one configuration."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.bench.arrivals import ArrivalConfig
from tandem.bench.config import BenchConfig
from tandem.bench.workloads.synthetic import Lengths
from tandem.deploy.cli.bench_config import bench_config
from tandem.deploy.cli.bench_options import add_bench_options
from tandem.deploy.cli.main import main
from tandem.deploy.cli.parser import OTHERS_BENCH_FLAGS, SuggestingParser

HTTP = ["--endpoint", "http://h:1/v1"]


def parse(*arguments: str, **environment: str) -> BenchConfig:
    parser = argparse.ArgumentParser(prog="tandem bench")
    add_bench_options(parser, "")
    return bench_config(parser.parse_args(arguments), environment, "127.0.0.1:50051")


def test_the_endpoint_is_this_hosts_cluster_unless_one_is_named() -> None:
    assert parse().endpoint.url == "grpc://127.0.0.1:50051"
    assert parse(TANDEM_ADDRESS="there:5").endpoint.url == "grpc://there:5"
    assert parse("--endpoint", "http://x/v1", TANDEM_ADDRESS="there:5").endpoint.url == "http://x/v1"


def test_arrivals_are_those_that_the_flags_imply(tmp_path: Path) -> None:
    assert parse().arrivals == ArrivalConfig("closed", concurrency=1)
    assert parse("--concurrency", "8").arrivals == ArrivalConfig("closed", concurrency=8)
    assert parse("--rate", "4").arrivals == ArrivalConfig("poisson", 4.0)
    assert parse("--rate", "4", "--arrivals", "burst", "--burst-size", "3").arrivals == ArrivalConfig(
        "burst", 4.0, burst_size=3
    )
    trace = ["--workload", "azure", "--trace", str(tmp_path)]
    assert parse(*trace).arrivals is None
    assert parse(*trace, "--concurrency", "2").arrivals == ArrivalConfig(concurrency=2)
    assert parse("--sweep", "rate=2..20", "--slo", "ttft=1s").arrivals == ArrivalConfig("poisson", 2.0)
    swept = parse("--sweep", "concurrency=2..20", "--slo", "ttft=1s").arrivals
    assert swept == ArrivalConfig("closed", concurrency=2)


def test_lengths_durations_headers_and_warm_up() -> None:
    config = parse("--input-tokens", "5..9", "--output-tokens", "3", "--warmup", "10", "--timeout", "2m")
    assert config.workload.input_lengths == Lengths(5, 9) and config.workload.output_lengths == Lengths(3, 3)
    assert (config.warmup_requests, config.warmup_s, config.endpoint.timeout_s) == (10, 0.0, 120.0)
    config = parse("--warmup", "500ms", "--header", "x-a: b", "--header", "c:d", "--api-key", "k")
    assert (config.warmup_requests, config.warmup_s) == (0, 0.5)
    assert config.endpoint.headers == (("x-a", "b"), ("c", "d")) and config.endpoint.api_key == "k"


def test_chats_are_text() -> None:
    assert parse().workload.prompt_as == "ids" and parse("--api", "chat").workload.prompt_as == "text"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arrivals", "closed", "--rate", "1"], "a rate is not for closed arrivals"),
        (["--rate", "1", "--concurrency", "2"], "a concurrency is for closed arrivals"),
        (["--arrivals", "poisson"], "need a rate above 0"),
        (["--workload", "steady-streams"], "prompts arrive at a rate"),
        (["--workload", "mooncake"], "--trace FILE"),
        (["--trace", "x"], "a trace is for the workloads"),
        (["--sweep", "rate=1..2"], "--slo"),
        (["--sweep", "rate=1..2", "--slo", "ttft=1s", "--rate", "3"], "leave out --rate"),
        (["--api", "chat", "--prompt-as", "ids"], "chats are text"),
        (["--endpoint", "localhost:50051"], "an endpoint is grpc://"),
        (["--endpoint", "grpc://localhost"], "a gRPC endpoint is grpc://HOST:PORT"),
        (["--endpoint", "http://"], "an HTTP endpoint is"),
        (["--tls-cert", "x"], "belong together"),
        (["--tls-ca", "/absent"], "cannot be read"),
        (["--warmup", "soon"], "a duration is a number with its unit"),
        (["--good-share", "0"], "the share of good requests"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tandem bench: ") and words in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--slo", "speed=1s"], "an SLO is NAME=DURATION"),
        (["--input-tokens", "9..5"], "lengths go from 1 up"),
        (["--header", "x"], "a header is NAME:VALUE"),
        (["--requests", "0"], "a whole number from 1 up"),
        (["--concurency", "3"], "did you mean --concurrency?"),
    ],
)
def test_a_bad_value_is_named(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--endpoint", "grpc://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("tandem bench: no cluster answers at 127.0.0.1:1")


def test_comparisons_name_the_file_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text("{}")
    for command in ("report", "plot"):
        assert main(["bench", command, str(tmp_path / "run.json"), "--out", str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err.startswith(f"tandem bench {command}: ")


def test_without_the_extra_one_is_told_what_to_install(tmp_path: Path) -> None:
    """Before any request is sent."""
    script = (
        "import importlib.util as u, sys; find = u.find_spec;"
        "u.find_spec = lambda name, *more: None if name in ('httptools', 'matplotlib') else find(name, *more);"
        "from tandem.deploy.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    for arguments in (HTTP, ["--plots", str(tmp_path / "plots")], ["--report", str(tmp_path / "report.html")]):
        command = [sys.executable, "-c", script, "bench", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert done.stderr.rstrip().endswith("pip install 'tandem-llm[bench]'")


@pytest.mark.parametrize(("typed", "ours"), OTHERS_BENCH_FLAGS.items())
def test_flags_of_others_are_answered_with_what_they_are_called_here(
    typed: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = SuggestingParser(prog="tandem bench")
    add_bench_options(parser, "")
    with pytest.raises(SystemExit):
        parser.parse_args([typed, "4"])
    assert f"(here that is {ours})" in capsys.readouterr().err
    assert ours in parser.format_help()
