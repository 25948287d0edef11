"""Models that were converted from GGUF files, each kept once, whatever its file is called and however many copies there
are. Imports no torch.

In the cache's directory a model is NAME-DIGEST, where NAME is that of the first file it was made of, and DIGEST is of
the file's content. What begins with a dot is the cache's own: locks, what is being written, and remembered digests.
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

# This is part of every digest: raise it whenever the conversion writes something different.
_CONVERSION_VERSION = 1
_DIGEST_BYTES = 8
# What older versions made, with a digest of the file's date, is listed and cleared like the rest.
_NAME = re.compile(r".+-[0-9a-f]{12,16}")
_UNFINISHED = re.compile(r"\..+-(?P<digest>[0-9a-f]{12,16})\.[^.]+")
_FILES = frozenset(
    ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
)


class Conversion(NamedTuple):
    """A model of the cache.

    Attributes:
        used_at: when a cluster last started with it, as time.time() has it.
        is_held: whether a running cluster uses it.
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
    """Any number of processes use one directory at once: a model appears under its name when it is whole, and goes by
    another rename. The kernel drops the locks of a process that is killed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def get(self, gguf: Path, on_progress: Progress | None = None, held: ExitStack | None = None) -> Path:
        """The converted form of a GGUF file, which is made at the first call for its content.

        Args:
            held: the model is not cleared before this is closed, or the process has ended.

        Raises:
            ValueError: there is no such file, it cannot be converted, or its model not be kept.
        """
        if not gguf.is_file():
            raise ValueError(f"no such GGUF file: {gguf}")
        try:
            digest = self._digest(gguf, on_progress)
            while True:
                path = self._find(digest) or self._convert(gguf, digest, on_progress)
                # It may be cleared by another process at any moment before it is held.
                if held is None or _hold(path, held):
                    break
        except OSError as error:
            raise ValueError(f"cannot keep the converted model in {self.directory}: {error}") from error
        # In a cache of somebody else's it is as good without.
        with contextlib.suppress(OSError):
            os.utime(path)
        return path

    def conversions(self) -> list[Conversion]:
        """What is there, last used first; OSError if it cannot be read."""
        found = []
        for path in self._paths():
            with contextlib.suppress(FileNotFoundError):
                num_bytes = sum(file.stat().st_size for file in path.iterdir())
                found.append(Conversion(path, num_bytes, path.stat().st_mtime, _is_held(path)))
        return sorted(found, key=lambda conversion: -conversion.used_at)

    def clear(self) -> list[Conversion]:
        """Removes all models but those in use, and what killed processes left half written; returns the models that are
        gone. Raises OSError if something cannot be removed."""
        gone = []
        for conversion in self.conversions():
            path = conversion.path
            # As hidden as what is half written, so that whoever is killed here leaves nothing that looks whole.
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
        """A file for each state of a GGUF file that was seen, with the digest of its content."""
        return self.directory / ".digests"

    def _paths(self) -> Iterator[Path]:
        """Whoever points the cache at a directory with other things in it keeps them."""
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
        # It imports numpy and gguf, which are needed here alone.
        from tandem.engine.weights.gguf import convert_gguf

        report = on_progress or (lambda stage, fraction: None)
        with self._exclusive(digest, on_wait=lambda: report("waiting for another process that converts it", 0.0)):
            # Another process may have been at it.
            if path := self._find(digest):
                return path
            # Who wrote these was killed, for whoever writes holds the lock.
            for left in self.directory.glob(f".*-{digest}.*/"):
                shutil.rmtree(left, ignore_errors=True)
            path = self.directory / f"{gguf.stem.lstrip('.') or 'model'}-{digest}"
            convert_gguf(gguf, path, lambda stage, fraction: report(f"converting, {stage}", fraction))
            return path

    def _digest(self, gguf: Path, on_progress: Progress | None) -> str:
        """Of the file's content, which is read only if the file is not just as it was when last seen."""
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
        """Lets one process in at a time; yields whether this one is in.

        Args:
            on_wait: called before another process is waited for; None: none is waited for.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = self.directory / f".{digest}.lock"
        while True:
            # Where others may write here too, a link of this name would lead to a file of somebody's.
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
                    # Who had it before has removed it.
                    continue
                try:
                    yield True
                finally:
                    lock.unlink(missing_ok=True)
                return


def _hold(path: Path, held: ExitStack) -> bool:
    """Keeps a model from being cleared until `held` is closed; False if it is gone already."""
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
    """Yields whether the directory could be locked, and is still there under its name."""
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
            # Some network file systems lock no directories: there a model can be used, and is never cleared.
            is_locked = kind == fcntl.LOCK_SH
        yield is_locked
    finally:
        os.close(lock)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether what is open has this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
