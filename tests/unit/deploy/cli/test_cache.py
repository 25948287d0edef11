"""`tandem cache` lists and removes converted models."""

import fcntl
import os
import time
from pathlib import Path

import pytest

from tandem.deploy.cli.main import main

OLD, NEW = "tiny-0123456789ab", "large-model-0123456789abcdef"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, num_bytes, age_s in ((OLD, 10**7, 3 * 86400), (NEW, 3 * 10**7, 7200)):
        model = tmp_path / name
        model.mkdir()
        (model / "config.json").touch()
        with (model / "model.safetensors").open("wb") as file:
            file.truncate(num_bytes)
        os.utime(model, (time.time() - age_s,) * 2)
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["cache", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_models_are_listed_with_size_and_age(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    total, _, first, second = run(capsys)
    assert total == f"{cache}: 2 converted models, 0.04 GB"
    assert first.split() == [NEW, "0.03", "GB", "2", "hours", "ago"]
    assert second.split() == [OLD, "0.01", "GB", "3", "days", "ago"]
    assert run(capsys, "path") == [str(cache)]


def test_all_but_what_is_in_use_is_cleared(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = os.open(cache / NEW, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
    assert run(capsys)[2].endswith("in use")
    removed, left = run(capsys, "clear")
    assert removed == f"Removed 1 converted model, 0.01 GB from {cache}"
    assert left == f"Left {NEW}: a running cluster uses it"
    os.close(held)
    assert run(capsys, "clear") == [f"Removed 1 converted model, 0.03 GB from {cache}"]
    assert list(cache.iterdir()) == []


def test_an_empty_cache_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "absent"))
    assert run(capsys) == [f"{tmp_path}/absent: 0 converted models, 0.00 GB"]
    assert run(capsys, "clear") == [f"Removed 0 converted models, 0.00 GB from {tmp_path}/absent"]
    assert not (tmp_path / "absent").exists()
