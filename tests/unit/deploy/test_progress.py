"""What a person sees while a cluster starts."""

import io

import pytest
from rich.console import Console

from deploy import progress
from deploy.progress import StartProgress


def lines(*messages: tuple[str, str]) -> list[str]:
    """What is printed where there is no terminal, without the times."""
    console = Console(file=io.StringIO(), force_terminal=False, width=100)
    with StartProgress(console) as show:
        for part, doing in messages:
            show(part, doing)
    assert isinstance(console.file, io.StringIO)
    return [line.partition(" s  ")[2] for line in console.file.getvalue().splitlines()]


def test_without_a_terminal_each_stage_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [
        ("prefill-0", "loading weights (0.00 of 1.20 GB)"),
        ("decode-0", "loading weights (0.10 of 1.20 GB)"),
        ("prefill-0", "loading weights (0.60 of 1.20 GB)"),
        ("prefill-0", "allocating pages"),
        ("prefill-0", "capturing CUDA graphs (1 of 3)"),
        ("prefill-0", "capturing CUDA graphs (2 of 3)"),
        ("prefill-0", "ready"),
    ]
    few = lines(*messages)
    assert few == [f"{part}: {doing}" for i, (part, doing) in enumerate(messages) if i not in (2, 5)]
    # A stage that goes on for long is heard of again.
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.0)
    assert lines(*messages) == [f"{part}: {doing}" for part, doing in messages]


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
