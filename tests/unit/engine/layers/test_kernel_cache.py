"""Compiled kernels in files: found again, never another's, never damaged, and never in the way."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem.engine.layers import kernel_cache
from tandem.engine.layers.kernel_cache import cache_directory, cached, key_of


class Compiler:
    def __init__(self, binary: bytes = b"binary") -> None:
        self.binary = binary
        self.num_calls = 0

    def __call__(self) -> bytes:
        self.num_calls += 1
        return self.binary


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TANDEM_KERNEL_CACHE", str(tmp_path / "kernels"))
    kernel_cache._warn.cache_clear()
    return tmp_path / "kernels"


def test_a_kernel_is_compiled_once(directory: Path) -> None:
    compiler = Compiler()
    for _ in range(3):
        assert cached("one", compiler) == b"binary"
    assert compiler.num_calls == 1
    assert cached("other", Compiler(b"other")) == b"other"
    assert cached("one", compiler) == b"binary"
    assert sorted(path.name for path in directory.iterdir()) == ["one.cubin", "other.cubin"]
    assert directory.stat().st_mode & 0o777 == 0o700


def test_all_that_decides_a_binary_changes_the_key() -> None:
    headers = {"a.cuh": b"A", "b.cuh": b"B"}
    keys = [
        key_of("nvrtc 13", ("-DA=1", "-DB=2"), "kernel", b"source", headers),
        key_of("nvrtc 14", ("-DA=1", "-DB=2"), "kernel", b"source", headers),
        key_of("nvrtc 13", ("-DA=1", "-DB=3"), "kernel", b"source", headers),
        key_of("nvrtc 13", ("-DB=2", "-DA=1"), "kernel", b"source", headers),
        key_of("nvrtc 13", ("-DA=1",), "kernel", b"source", headers),
        key_of("nvrtc 13", ("-DA=1-DB=2",), "kernel", b"source", headers),
        key_of("nvrtc 13", ("-DA=1", "-DB=2"), "kernels", b"ource", headers),
        key_of("nvrtc 13", ("-DA=1", "-DB=2"), "kernel", b"source ", headers),
        key_of("nvrtc 13", ("-DA=1", "-DB=2"), "kernel", b"source", {**headers, "b.cuh": b"C"}),
        key_of("nvrtc 13", ("-DA=1", "-DB=2"), "kernel", b"source", {**headers, "c.cuh": b""}),
        key_of("nvrtc 13", ("-DA=1", "-DB=2"), "kernel", b"source", {"a.cuh": b"B", "b.cuh": b"A"}),
        key_of("nvrtc 13", ("-DA=1", "-DB=2", "a.cuh"), "kernel", b"source", {"b.cuh": b"B"}),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == key_of("nvrtc 13", ["-DA=1", "-DB=2"], "kernel", b"source", dict(reversed(headers.items())))


@pytest.mark.parametrize("damaged", [b"", b"x", b"\0" * 100])
def test_a_damaged_file_is_replaced(damaged: bytes, directory: Path) -> None:
    compiler = Compiler()
    cached("key", compiler)
    cached("other", Compiler(b"other"))
    path = directory / "key.cubin"
    whole = path.read_bytes()
    for content in (damaged, whole[:-1], whole + b"!", (directory / "other.cubin").read_bytes()):
        path.write_bytes(content)
        assert cached("key", compiler) == b"binary"
        assert path.read_bytes() == whole
    assert compiler.num_calls == 5


def test_a_directory_that_others_may_write_is_not_used(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    cached("key", Compiler())
    directory.chmod(0o777)
    compiler = Compiler(b"fresh")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert cached("key", compiler) == b"fresh"
    assert compiler.num_calls == 2
    assert caplog.text.count("no other user can write to") == 1


def test_a_directory_that_cannot_be_made_costs_only_time(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory.write_text("a file")
    compiler = Compiler()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert cached("key", compiler) == b"binary"
    assert compiler.num_calls == 2
    assert caplog.text.count("are not kept") == 1


def test_a_kernel_that_cannot_be_compiled_leaves_no_file(directory: Path) -> None:
    def fail() -> bytes:
        raise RuntimeError("no such header")

    with pytest.raises(RuntimeError, match="no such header"):
        cached("key", fail)
    assert not list(directory.iterdir())


def test_writers_at_once_leave_one_whole_file(directory: Path) -> None:
    binary = bytes(range(256)) * 400
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: cached("key", Compiler(binary)), range(64)))
    assert set(found) == {binary}
    assert [path.name for path in directory.iterdir()] == ["key.cubin"]


def test_the_directory_is_below_tandems_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TANDEM_KERNEL_CACHE", raising=False)
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path / "kernels"
    monkeypatch.setenv("TANDEM_KERNEL_CACHE", str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own"
