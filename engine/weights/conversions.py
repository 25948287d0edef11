"""Cache of models converted from GGUF files, one for each distinct content. Imports no torch.

A model's directory is NAME-DIGEST: NAME comes from the first file converted, DIGEST from the content. Names with a
leading dot are locks, unfinished conversions and remembered digests.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

Progress = Callable[[str, float], None]

# Part of every digest: raise it when the conversion's output changes.
_CONVERSION_VERSION = 1
_DIGEST_BYTES = 8
# Models of older versions, whose digest covers the file's date, are listed and cleared too.
_NAME = re.compile(r".+-[0-9a-f]{12,16}")
_UNFINISHED = re.compile(r"\..+-(?P<digest>[0-9a-f]{12,16})\.[^.]+")
_FILES = frozenset(
    ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
)


class Conversion(NamedTuple):
    """
    Attributes:
        used_at: time.time() of the last cluster start with it.
    """

    path: Path
    num_bytes: int
    used_at: float
    is_held: bool


def default_directory() -> Path:
    """``$TANDEM_CACHE``, else ``$XDG_CACHE_HOME/tandem``, else ``~/.cache/tandem``."""
    if own := os.environ.get("TANDEM_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "tandem"
    return Path.home() / ".cache" / "tandem"


class ConversionCache:
    """Processes may share one directory: models appear and disappear by a rename, and the kernel drops a killed
    process's locks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def get(self, gguf: Path, on_progress: Progress | None = None, held: ExitStack | None = None) -> Path:
        """Returns the converted form of a GGUF file; the first call for a content converts it.

        Args:
            held: until it is closed, or the process ends, the model is not cleared.

        Raises:
            ValueError: the file is missing or cannot be converted, or the model cannot be stored.
        """
        if not gguf.is_file():
            raise ValueError(f"no such GGUF file: {gguf}")
        try:
            digest = self._digest(gguf, on_progress)
            while True:
                path = self._find(digest) or self._convert(gguf, digest, on_progress)
                # Another process may clear it until it is held.
                if held is None or _hold(path, held):
                    break
        except OSError as error:
            raise ValueError(f"cannot keep the converted model in {self.directory}: {error}") from error
        with contextlib.suppress(OSError):
            os.utime(path)
        return path

    def conversions(self) -> list[Conversion]:
        """Returns the converted models, last used first. Raises OSError if the directory cannot be read."""
        found = []
        for path in self._paths():
            with contextlib.suppress(FileNotFoundError):
                num_bytes = sum(file.stat().st_size for file in path.iterdir())
                found.append(Conversion(path, num_bytes, path.stat().st_mtime, _is_held(path)))
        return sorted(found, key=lambda conversion: -conversion.used_at)

    def clear(self) -> list[Conversion]:
        """Removes and returns all models that are not in use, and leftovers of killed processes. May raise OSError."""
        gone = []
        for conversion in self.conversions():
            path = conversion.path
            # Renamed first, so that a kill during the removal leaves no seemingly complete model.
            away = path.with_name(f".{path.name}.{os.getpid()}-{time.time_ns()}")
            with _locked_directory(path, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_locked:
                if is_locked:
                    path.rename(away)
            if is_locked:
                shutil.rmtree(away)
                gone.append(conversion)
        if self.directory.is_dir():
            for path in self.directory.iterdir():
                unfinished = _UNFINISHED.fullmatch(path.name)
                if unfinished and path.is_dir():
                    with self._exclusive(unfinished["digest"]) as is_alone:
                        if is_alone:
                            shutil.rmtree(path, ignore_errors=True)
            shutil.rmtree(self._digests, ignore_errors=True)
        return gone

    @property
    def _digests(self) -> Path:
        return self.directory / ".digests"

    def _paths(self) -> Iterator[Path]:
        if not self.directory.is_dir():
            return
        for path in self.directory.iterdir():
            is_own = _NAME.fullmatch(path.name) is not None and not path.name.startswith(".")
            if is_own and path.is_dir() and not path.is_symlink():
                with contextlib.suppress(FileNotFoundError):
                    names = {file.name for file in path.iterdir()}
                    if "config.json" in names and names <= _FILES:
                        yield path

    def _find(self, digest: str) -> Path | None:
        return next((path for path in self._paths() if path.name.endswith(f"-{digest}")), None)

    def _convert(self, gguf: Path, digest: str, on_progress: Progress | None) -> Path:
        from tandem.engine.weights.gguf.convert import convert_gguf

        report = on_progress or (lambda stage, fraction: None)
        with self._exclusive(digest, on_wait=lambda: report("waiting for another process that converts it", 0.0)):
            if path := self._find(digest):
                return path
            # Leftovers of killed processes: writers hold the lock.
            for left in self.directory.glob(f".*-{digest}.*/"):
                shutil.rmtree(left, ignore_errors=True)
            path = self.directory / f"{gguf.stem.lstrip('.') or 'model'}-{digest}"
            convert_gguf(gguf, path, lambda stage, fraction: report(f"converting, {stage}", fraction))
            return path

    def _digest(self, gguf: Path, on_progress: Progress | None) -> str:
        """Reads the content only if the file's state has changed."""
        stat = gguf.stat()
        state = (gguf.resolve(), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        key = hashlib.blake2b(f"{_CONVERSION_VERSION} {state}".encode(), digest_size=16).hexdigest()
        remembered = self._digests / key
        with contextlib.suppress(OSError):
            if re.fullmatch(r"[0-9a-f]{16}", digest := remembered.read_text()):
                return digest
        if on_progress is not None:
            on_progress("reading the file", 0.0)
        with gguf.open("rb") as file:
            person = f"tandem {_CONVERSION_VERSION}".encode()
            digest = hashlib.file_digest(
                file, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES, person=person)
            ).hexdigest()
        with contextlib.suppress(OSError):
            self._digests.mkdir(parents=True, exist_ok=True)
            draft = remembered.with_name(f"{key}.{os.getpid()}")
            draft.write_text(digest)
            draft.replace(remembered)
        return digest

    @contextmanager
    def _exclusive(self, digest: str, on_wait: Callable[[], None] | None = None) -> Iterator[bool]:
        """Admits one process at a time; yields whether this one is admitted. Without `on_wait` it does not wait."""
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = self.directory / f".{digest}.lock"
        while True:
            # O_NOFOLLOW: in a shared directory, this name could be a link to another user's file.
            with os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644), "w") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if on_wait is None:
                        yield False
                        return
                    on_wait()
                    fcntl.flock(file, fcntl.LOCK_EX)
                if not _is_at(lock, file.fileno()):
                    # The previous holder has removed the file.
                    continue
                try:
                    yield True
                finally:
                    lock.unlink(missing_ok=True)
                return


def _hold(path: Path, held: ExitStack) -> bool:
    """Keeps a model from being cleared; False if it is already gone."""
    lock = held.enter_context(ExitStack())
    is_held = lock.enter_context(_locked_directory(path, fcntl.LOCK_SH))
    if not is_held:
        lock.close()
    return is_held


def _is_held(path: Path) -> bool:
    with _locked_directory(path, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_free:
        return not is_free


@contextmanager
def _locked_directory(path: Path, kind: int) -> Iterator[bool]:
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(lock, kind)
            is_locked = _is_at(path, lock)
        except BlockingIOError:
            is_locked = False
        except OSError:
            # Some network file systems cannot lock directories: their models are usable, but never cleared.
            is_locked = kind == fcntl.LOCK_SH
        yield is_locked
    finally:
        os.close(lock)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
