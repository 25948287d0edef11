"""The cache of converted models: each is kept once, and survives kills and other processes."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tandem.engine.weights.conversions import ConversionCache
from tandem.engine.weights.gguf import convert as gguf_conversion
from tandem.engine.weights.resolve import resolve_model

# A process that uses a cache; its conversion runs until a file named `go` exists.
PROCESS = """
import sys, time
from contextlib import ExitStack
from pathlib import Path
from tandem.engine.weights.gguf import convert as conversion
from tandem.engine.weights.conversions import ConversionCache

def convert(source, out, on_progress):
    scratch = out.with_name(f".{out.name}.scratch")
    scratch.mkdir()
    (scratch / "model.safetensors").write_text("half")
    (root / "began").touch()
    while not (root / "go").exists():
        time.sleep(0.01)
    (scratch / "config.json").write_text("{}")
    with (root / "conversions").open("a") as log:
        log.write("one\\n")
    scratch.rename(out)

root, source = map(Path, sys.argv[1:])
conversion.convert_gguf = convert
held = ExitStack()
path = ConversionCache(root / "cache").get(source, lambda stage, fraction: (root / stage).touch(), held)
print(path, flush=True)
sys.stdin.read()
"""
Processes = Callable[[Path], "subprocess.Popen[str]"]


def convert(source: Path, out: Path, on_progress: object = None) -> None:
    out.mkdir(parents=True)
    (out / "config.json").write_text("{}")
    (out / "model.safetensors").write_bytes(source.read_bytes())


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    converted: list[Path] = []

    def count(source: Path, out: Path, on_progress: object) -> None:
        converted.append(source)
        convert(source, out)

    monkeypatch.setattr(gguf_conversion, "convert_gguf", count)
    return converted


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Processes]:
    started: list[subprocess.Popen[str]] = []

    def start(source: Path) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", PROCESS, str(tmp_path), str(source)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate()


def gguf_file(path: Path, content: bytes = b"GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def answer(process: "subprocess.Popen[str]") -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20.0
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} has not come"
        time.sleep(0.01)


def test_all_copies_of_a_file_share_one_model(tmp_path: Path, conversions: list[Path]) -> None:
    cache = ConversionCache(tmp_path / "cache")
    source = gguf_file(tmp_path / "Tiny.Q4.gguf")
    first = cache.get(source)
    assert first.parent == cache.directory and first.name.startswith("Tiny.Q4-")
    copies = [gguf_file(tmp_path / "elsewhere/Tiny.Q4.gguf"), gguf_file(tmp_path / "renamed.gguf")]
    os.utime(copies[0], (0, 0))
    assert [cache.get(copy) for copy in (*copies, source)] == [first] * 3
    assert len(conversions) == 1
    # This change shows in neither size nor date.
    stat = source.stat()
    source.write_bytes(b"FUGG")
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert cache.get(source) != first
    assert len(conversions) == 2


def test_known_file_is_not_read_again(tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ConversionCache(tmp_path / "cache")
    source = gguf_file(tmp_path / "tiny.gguf")
    path = cache.get(source)
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert cache.get(source) == path


def test_environment_sets_the_cache_directory(
    tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = gguf_file(tmp_path / "tiny.gguf")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TANDEM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert resolve_model(str(source), "dummy").parent == tmp_path / "home" / ".cache" / "tandem"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert resolve_model(str(source), "dummy").parent == tmp_path / "xdg" / "tandem"
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "own"))
    assert resolve_model(str(source), "dummy").parent == tmp_path / "own"
    monkeypatch.setenv("TANDEM_CACHE", str(source))
    with pytest.raises(ValueError, match="cannot keep the converted model in"):
        resolve_model(str(source))


def test_of_two_processes_one_converts_and_the_other_waits(tmp_path: Path, process: Processes) -> None:
    # Their files are two copies with different names.
    first = process(gguf_file(tmp_path / "one.gguf"))
    wait_for(tmp_path / "began")
    second = process(gguf_file(tmp_path / "two.gguf"))
    # Files mark the stages by their names.
    wait_for(tmp_path / "waiting for another process that converts it")
    (tmp_path / "go").touch()
    assert answer(first) == answer(second)
    assert (tmp_path / "conversions").read_text() == "one\n"


def test_partial_files_of_a_killed_process_are_removed(
    tmp_path: Path, process: Processes, conversions: list[Path]
) -> None:
    cache = ConversionCache(tmp_path / "cache")
    source = gguf_file(tmp_path / "tiny.gguf")
    killed = process(source)
    wait_for(tmp_path / "began")
    # A running process's files are not leftovers.
    assert cache.clear() == [] and list(cache.directory.glob(".tiny-*.scratch"))
    killed.send_signal(signal.SIGKILL)
    killed.wait(10.0)
    left = list(cache.directory.glob(".tiny-*.scratch"))
    assert left and cache.conversions() == []
    path = cache.get(source)
    assert (path / "model.safetensors").read_bytes() == b"GGUF"
    assert [one for one in left if one.exists()] == []
    shutil.copytree(path, left[0])
    cache.clear()
    assert not left[0].exists()


def test_files_held_by_a_process_are_not_cleared(tmp_path: Path, process: Processes, conversions: list[Path]) -> None:
    cache = ConversionCache(tmp_path / "cache")
    (tmp_path / "go").touch()
    holder = process(gguf_file(tmp_path / "used.gguf"))
    used = answer(holder)
    idle = cache.get(gguf_file(tmp_path / "idle.gguf", b"GGUF, another"))
    assert {c.path: c.is_held for c in cache.conversions()} == {used: True, idle: False}
    assert [gone.path for gone in cache.clear()] == [idle]
    assert used.is_dir() and not idle.exists()
    holder.send_signal(signal.SIGKILL)
    holder.wait(10.0)
    assert [gone.path for gone in cache.clear()] == [used]
    assert cache.conversions() == []


def test_model_cleared_before_it_is_held_is_made_again(
    tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ConversionCache(tmp_path / "cache")
    source = gguf_file(tmp_path / "tiny.gguf")
    find = cache._find

    def find_and_lose(digest: str) -> Path | None:
        path = find(digest)
        if path is not None and len(conversions) == 1:
            cache.clear()
        return path

    cache.get(source)
    monkeypatch.setattr(cache, "_find", find_and_lose)
    with ExitStack() as held:
        assert cache.get(source, held=held).is_dir()
        assert len(conversions) == 2
        assert cache.clear() == []
    assert len(cache.clear()) == 1


def test_other_files_in_the_directory_stay(tmp_path: Path, conversions: list[Path]) -> None:
    cache = ConversionCache(tmp_path)
    cache.get(gguf_file(tmp_path / "tiny.gguf"))
    others = [tmp_path / "notes-0123456789ab", tmp_path / "model-cafe", tmp_path / ".hidden"]
    for other in others:
        other.mkdir()
        (other / "config.json").touch()
    (others[0] / "thesis.txt").touch()
    assert len(cache.clear()) == 1
    assert all((other / "config.json").exists() for other in others)
    assert (tmp_path / "tiny.gguf").exists()


def test_symlink_in_the_cache_is_not_used(tmp_path: Path, conversions: list[Path]) -> None:
    cache = ConversionCache(tmp_path / "cache")
    path = cache.get(gguf_file(tmp_path / "tiny.gguf"))
    kept = tmp_path / "kept"
    shutil.copytree(path, kept)
    (cache.directory / "other-0123456789abcdef").symlink_to(kept)
    assert [conversion.path for conversion in cache.clear()] == [path]
    assert (kept / "config.json").exists()


def test_lock_is_not_followed_to_another_file(tmp_path: Path, conversions: list[Path]) -> None:
    cache, source = ConversionCache(tmp_path / "cache"), gguf_file(tmp_path / "tiny.gguf")
    digest = cache.get(source).name.rpartition("-")[2]
    cache.clear()
    precious = gguf_file(tmp_path / "precious")
    (cache.directory / f".{digest}.lock").symlink_to(precious)
    with pytest.raises(ValueError, match="cannot keep the converted model"):
        cache.get(source)
    assert precious.read_bytes() == b"GGUF"


def test_model_of_a_hidden_file_is_visible(tmp_path: Path, conversions: list[Path]) -> None:
    cache = ConversionCache(tmp_path / "cache")
    path = cache.get(gguf_file(tmp_path / ".tiny.gguf"))
    assert [conversion.path for conversion in cache.conversions()] == [path]
