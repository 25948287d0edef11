"""Suggestions for mistyped flags, commands and values."""

import pytest

from tandem.deploy.cli.main import main
from tandem.deploy.cli.parser import OTHERS_FLAGS, UNSERVED_FLAGS
from tandem.deploy.cli.serve_options import SERVE_OPTIONS


@pytest.mark.parametrize(
    ("line", "program", "suggestion"),
    [
        ("serve --model m --prefil 2", "tandem serve", "(did you mean --prefill?)"),
        ("serve --model m --eviktion=lru", "tandem serve", "(did you mean --eviction?)"),
        ("chat --temprature 3", "tandem chat", "(did you mean --temperature?)"),
        ("srve --model m", "tandem", "(did you mean serve?)"),
        (
            "serve --model m --num-page 3",
            "tandem serve",
            "unrecognized arguments: --num-page 3 (did you mean --num-pages?)",
        ),
        ("serve --model m --dtype int3", "tandem serve", ""),
        ("serve --model m --dtype bfloat", "tandem serve", "(did you mean bfloat16?)"),
        ("serve --model m --device gpu", "tandem serve", "(did you mean cuda?)"),
        # Flags of other commands are no suggestions.
        ("chat --page-siz 3", "tandem chat", ""),
        ("serve --model m --frobnicate", "tandem serve", ""),
    ],
)
def test_what_was_probably_meant_is_named(
    line: str, program: str, suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    assert stop.value.code == 2
    *usage, last = capsys.readouterr().err.splitlines()
    assert len(usage) <= 2
    assert last.startswith(f"{program}: error: ") and last.endswith(suggestion)
    assert ("did you mean" in last) == bool(suggestion)


def test_a_long_usage_does_not_hide_the_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for line, error in (
        ("serve --tp two", "tandem serve: error: argument --tp: invalid int value: 'two'"),
        ("estimate --model m", "tandem estimate: error: the following arguments are required: --workload"),
        ("generate", "tandem generate: error: the following arguments are required: prompt"),
    ):
        with pytest.raises(SystemExit):
            main(line.split())
        assert capsys.readouterr().err.splitlines() == [f"usage: see tandem {line.split()[0]} --help", error]
    with pytest.raises(SystemExit):
        main(["stop", "one", "another"])
    assert capsys.readouterr().err.startswith("usage: tandem stop [-h]")


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("--model m --port 8000", "(here that is --http-port and --grpc-port)"),
        ("--model m --gpu-memory-utilization=0.9", "(here that is --mem-fraction-static)"),
        ("--model m --tensor-parallel-size 2", "(here that is --tp)"),
        ("org/name", "(did you mean --model org/name?)"),
    ],
)
def test_what_other_servers_call_it_is_told(given: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", *given.split()])
    assert advice in capsys.readouterr().err.splitlines()[-1]


def test_what_is_told_exists() -> None:
    known = {f"--{option.name}" for option in SERVE_OPTIONS}
    told = {name for advice in OTHERS_FLAGS.values() for name in advice.split(" and ")}
    assert told <= known and not known & (OTHERS_FLAGS.keys() | UNSERVED_FLAGS.keys())


def test_a_name_of_a_table_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "m", "--routing", "round_robbin"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tandem serve: --routing must be one of round_robin, ") and error.count("\n") == 1
    assert "or the import path package.module:Class of a class of your own" in error
    assert error.endswith("not 'round_robbin' (did you mean 'round_robin'?)\n")
