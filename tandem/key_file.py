"""API keys in a file, which may be replaced while a cluster serves."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tandem.config import parse_api_key
from tandem.watched_files import WatchedFiles


@dataclass(frozen=True, slots=True)
class KeyFile:
    """
    Attributes:
        path: absolute; the same on every host.
        other_keys: from flags and the environment, which stay.
    """

    path: str
    other_keys: tuple[str, ...] = field(default=(), repr=False)

    def read(self) -> tuple[str, ...]:
        """Return all keys, as "KEY" or "KEY MAX_PRIORITY". Raises ValueError as `read_key_file` and `check_keys`."""
        keys = tuple(dict.fromkeys([*self.other_keys, *read_key_file(Path(self.path))]))
        check_keys(keys)
        return keys


def watched_keys(key_file: KeyFile, apply: Callable[[tuple[str, ...]], object]) -> WatchedFiles:
    """Args: apply: takes all keys, on the thread that polls."""

    def load() -> None:
        apply(key_file.read())

    return WatchedFiles([key_file.path], load, "the API keys")


def check_keys(keys: tuple[str, ...]) -> None:
    """Raises ValueError: a key is none, or is there twice. The message repeats no key."""
    parsed = [parse_api_key(text).key for text in keys]
    if len(parsed) != len(set(parsed)):
        raise ValueError("api_keys has one key twice, with different priorities: keep one of the two")


def read_key_file(path: Path) -> list[str]:
    """Raises ValueError: the file cannot be read or holds no keys."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except OSError as error:
        raise ValueError(f"--api-key-file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--api-key-file {path} is not UTF-8 text") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"--api-key-file {path} holds no key: write one a line")
    return keys
