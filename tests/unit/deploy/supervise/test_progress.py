"""Output during the start of a cluster."""

import io
import time

import pytest
from rich.console import Console

from tandem.deploy.supervise import progress
from tandem.deploy.supervise.progress import SILENCE_S, StartProgress
from tests.fakes.clock import FakeClock


def lines(*messages: tuple[str, str]) -> list[str]:
    """Returns the lines printed without a terminal, without times."""
    console = Console(file=io.StringIO(), force_terminal=False, width=100)
    with StartProgress(console) as show:
        for part, doing in messages:
            show(part, doing)
    assert isinstance(console.file, io.StringIO)
    return [line.partition(" s  ")[2] for line in console.file.getvalue().splitlines()]


def test_without_a_terminal_each_stage_has_a_line() -> None:
    messages = [
        ("prefill-0", "loading weights (0.00 of 1.20 GB)"),
        ("decode-0", "loading weights (0.10 of 1.20 GB)"),
        ("prefill-0", "loading weights (0.60 of 1.20 GB)"),
        ("prefill-0", "allocating pages"),
        ("prefill-0", "capturing CUDA graphs (1 of 3)"),
        ("prefill-0", "capturing CUDA graphs (2 of 3)"),
        ("prefill-0", "ready"),
    ]
    assert lines(*messages) == [f"{part}: {doing}" for i, (part, doing) in enumerate(messages) if i not in (2, 5)]


def test_what_takes_long_is_said_again_and_again() -> None:
    console, clock = Console(file=io.StringIO(), force_terminal=False, width=20), FakeClock()
    show = StartProgress(console, started_s_ago=0.5, clock=clock)
    show("model", "ready")
    show("prefill-0", "loading weights (0.00 of 1.20 GB)")
    show("decode-0", "loading weights (0.10 of 1.20 GB)")
    for step in range(int(3 * SILENCE_S) * 2):
        clock.advance(0.5)
        show("prefill-0", f"loading weights ({step / 10:.2f} of 1.20 GB)")
        show.break_silence()
    show("prefill-0", "ready")
    show("decode-0", "ready")
    clock.advance(10 * SILENCE_S)
    # All parts are ready.
    show.break_silence()
    assert isinstance(console.file, io.StringIO)
    printed = [line.split(" s  ") for line in console.file.getvalue().splitlines()]
    assert [float(at) for at, _ in printed] == [0.5] * 3 + [0.5 + n * SILENCE_S for n in (1, 2, 3, 3, 3)]
    assert printed[3][1] == "prefill-0: loading weights (0.30 of 1.20 GB), decode-0: loading weights (0.10 of 1.20 GB)"


def test_a_silence_is_broken_while_the_one_who_reports_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENCE_S", 0.1)
    console = Console(file=io.StringIO(), force_terminal=False)
    assert isinstance(console.file, io.StringIO)
    with StartProgress(console) as show:
        show("ray", "starting")
        deadline = time.monotonic() + 10.0
        while console.file.getvalue().count("ray: starting") < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_on_a_terminal_a_stage_that_tells_how_far_it_is_has_a_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with StartProgress(console) as show:
        show("model", "ready")
        show("prefill-0", "loading weights (0.60 of 1.20 GB)")
        show("decode-0", "warming up")
    assert isinstance(console.file, io.StringIO)
    *_, model, prefill, decode = [line for line in console.file.getvalue().splitlines() if "0" in line]
    assert "ready after" in model and "━" not in model
    assert "loading weights" in prefill and prefill.count("━") >= 20 and "0.60 of 1.20 GB" in prefill
    assert "warming up" in decode and "━" not in decode
