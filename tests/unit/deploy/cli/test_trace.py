"""`tandem trace` and its file."""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.client import TandemError
from tandem.deploy.cli.trace import run_trace
from tandem.v1 import recording_pb2 as pb


class Client:
    """Attributes: meanwhile: runs during a recording."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self._meanwhile = meanwhile

    def record(self, duration_s: float) -> Iterator[pb.RecordedPart]:
        self._meanwhile()
        yield pb.RecordedPart(process="router-0", role="router")


def trace_to(out: Path, meanwhile: Callable[[], object] = lambda: None) -> int:
    arguments = argparse.Namespace(name="tandem trace", seconds=1.0, out=str(out), address="", address_from="--address")
    return run_trace(arguments, Client(meanwhile))  # type: ignore[arg-type]


def test_a_second_command_for_the_same_file_leaves_the_first_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "trace.json"

    def refuse() -> None:
        raise TandemError("RESOURCE_EXHAUSTED", "another recording is being made")

    def another_command() -> None:
        own = os.getpid()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: own + 1)
            assert trace_to(out, refuse) == 1

    assert trace_to(out, another_command) == 0
    assert json.loads(out.read_text())["otherData"]["warnings"] == []
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_what_is_no_file_stays_what_it_is(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    if kind == "directory":
        out.mkdir()
    else:
        os.mkfifo(out)
    assert trace_to(out, lambda: pytest.fail("somebody waited for a recording")) == 1
    assert "is no file" in capsys.readouterr().err
    assert out.is_dir() or out.is_fifo()
    assert list(tmp_path.iterdir()) == [out]


def test_a_place_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "nobody" / "trace.json"
    assert trace_to(out, lambda: pytest.fail("somebody waited for a recording")) == 1
    assert capsys.readouterr().err == f"tandem trace: {out} cannot be written: No such file or directory\n"
