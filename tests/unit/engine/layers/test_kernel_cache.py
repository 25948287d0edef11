"""Compiled kernels in files: found again, never damaged, and never in the way."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem.engine.layers.kernel_cache import cache_directory, cached, key_of


class Compiler:
    def __init__(self, binary: bytes = b"binary") -> None:
        self.binary = binary
        self.num_calls = 0

    def __call__(self) -> bytes:
        self.num_calls += 1
        return self.binary


def test_a_kernel_is_compiled_once(tmp_path: Path) -> None:
    compiler = Compiler()
    key, other = key_of([b"source", b"-DA=1"]), key_of([b"source", b"-DA=2"])
    for _ in range(3):
        assert cached(tmp_path / "new", key, compiler) == b"binary"
    assert compiler.num_calls == 1
    assert cached(tmp_path / "new", other, Compiler(b"other")) == b"other"
    assert cached(tmp_path / "new", key, compiler) == b"binary"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(f"{k}.cubin" for k in (key, other))


def test_each_part_changes_the_key() -> None:
    keys = [key_of(parts) for parts in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"abc", b""], [b"c", b"ab"])]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("damaged", [b"", b"x", b"\0" * 100])
def test_a_damaged_file_is_replaced(damaged: bytes, tmp_path: Path) -> None:
    compiler = Compiler()
    cached(tmp_path, "key", compiler)
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    for content in (damaged, whole[:-1], whole + b"!"):
        path.write_bytes(content)
        assert cached(tmp_path, "key", compiler) == b"binary"
        assert path.read_bytes() == whole
    assert compiler.num_calls == 4


def test_a_directory_that_cannot_be_used_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    compiler = Compiler()
    for _ in range(2):
        assert cached(tmp_path / "file" / "kernels", "key", compiler) == b"binary"
    assert compiler.num_calls == 2


def test_a_kernel_that_cannot_be_compiled_leaves_no_file(tmp_path: Path) -> None:
    def fail() -> bytes:
        raise RuntimeError("no such header")

    with pytest.raises(RuntimeError, match="no such header"):
        cached(tmp_path, "key", fail)
    assert not list(tmp_path.iterdir())


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    binary = bytes(range(256)) * 400
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: cached(tmp_path, "key", Compiler(binary)), range(64)))
    assert set(found) == {binary}
    assert [path.name for path in tmp_path.iterdir()] == ["key.cubin"]


def test_the_directory_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "tandem" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert cache_directory() == tmp_path / "other" / "tandem" / "kernels"
