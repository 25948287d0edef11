"""Which installed version may join a running cluster."""

import time
from pathlib import Path

import pytest

from tandem.deploy.supervise import installed
from tandem.deploy.supervise.installed import CheckInstalled, described, difference


def test_same_version_may_join() -> None:
    check = CheckInstalled()
    deadline = time.monotonic() + 60
    while (refusal := check.refusal()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert refusal == ""


def test_newer_version_with_the_same_protocol_and_options_may_join() -> None:
    assert difference(described(), {**described(), "version": "99.0"}) == ""


def test_other_protocol_or_options_are_refused_in_one_line() -> None:
    running = described()
    newer = {**running, "version": "99.0"}
    for other, words in (
        ({**newer, "protocol": 99}, f"its protocol version is 99, not {running['protocol']}"),
        *(
            ({**newer, "orders": {**running["orders"], kind: ["new"]}}, "its processes take other options")
            for kind in ("RouterConfig", "StoreConfig", "WorkerPlan")
        ),
    ):
        refusal = difference(running, other)
        assert refusal.startswith(f"the installed tandem 99.0 cannot join the running {running['version']}: {words}")
        assert "\n" not in refusal


def test_nested_fields_count() -> None:
    fields = described()["orders"]["WorkerPlan"]
    assert "worker" in fields and "worker.engine.dtype" in fields
    assert "namespace_secret" in described()["orders"]["StoreConfig"]


def test_broken_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed.sys, "executable", "/bin/false")
    check = CheckInstalled()
    deadline = time.monotonic() + 60
    while (refusal := check.refusal()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert refusal == "the installed tandem does not start: exit status 1"


def test_an_install_that_does_not_answer_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o700)
    monkeypatch.setattr(installed.sys, "executable", str(silent))
    assert CheckInstalled(timeout_s=0.0).refusal() == "the installed tandem does not start: exit status -9"


@pytest.mark.parametrize("answer", ["hello", "{}", "[]"])
def test_an_install_that_answers_something_else_is_refused(
    answer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "python"
    other.write_text(f"#!/bin/sh\necho '{answer}'\n")
    other.chmod(0o700)
    monkeypatch.setattr(installed.sys, "executable", str(other))
    check = CheckInstalled()
    deadline = time.monotonic() + 60
    while (refusal := check.refusal()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert refusal.startswith("the installed tandem does not describe itself")
