"""API keys from a file, at the start and after a change."""

import logging
from pathlib import Path

import pytest

from tandem.key_file import KeyFile, read_key_file, watched_keys


def test_file_without_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    path.write_text("# none yet\n\n")
    with pytest.raises(ValueError, match=r"keys\.txt holds no key: write one a line"):
        read_key_file(path)
    path.write_bytes(b"\xef\xbb\xbfsaved-with-a-mark\r\n")
    assert read_key_file(path) == ["saved-with-a-mark"]
    path.write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read_key_file(path)


def test_keys_of_flags_stay_beside_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    path.write_text("one 5\ntwo\n")
    assert KeyFile(str(path), ("flag", "two")).read() == ("flag", "two", "one 5")
    with pytest.raises(ValueError, match="one key twice") as error:
        KeyFile(str(path), ("one",)).read()
    assert "one 5" not in str(error.value)
    assert "secret" not in repr(KeyFile(str(path), ("secret",)))


def test_unusable_new_file_keeps_the_old_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.txt"
    path.write_text("one\n")
    seen: list[tuple[str, ...]] = []
    watched = watched_keys(KeyFile(str(path)), seen.append)
    for _ in range(3):
        watched.poll()
    assert seen == [("one",)]
    for content in ("# none\n", "with space in it\n", "one\none 5\n"):
        path.write_text(content)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                watched.poll()
        (line,) = caplog.messages
        assert line.startswith("the API keys stay as they were: ") and "in it" not in line
        caplog.clear()
    path.unlink()
    watched.poll()
    assert "cannot be read: No such file" in caplog.text
    path.write_text("two\n")
    watched.poll()
    assert seen == [("one",), ("two",)]
