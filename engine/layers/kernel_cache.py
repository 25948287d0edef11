"""Compiled kernels of earlier processes, in files below ~/.cache/tandem/kernels."""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

_DIGEST_SIZE = hashlib.sha256().digest_size


def cache_directory() -> Path:
    """Returns the directory, below $XDG_CACHE_HOME if that is set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "kernels"


def key_of(parts: Iterable[bytes]) -> str:
    """Returns a name for all that decides a binary."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def cached(directory: Path, key: str, compile_kernel: Callable[[], bytes]) -> bytes:
    """Returns the binary of a key, and keeps it. A directory that cannot be used costs only the time to compile."""
    path = directory / f"{key}.cubin"
    if (known := _read(path)) is not None:
        return known
    binary = compile_kernel()
    try:
        _write(path, binary)
    except OSError as error:
        logger.debug("%s does not keep compiled kernels: %s", directory, error)
    return binary


def _read(path: Path) -> bytes | None:
    """Returns None without a file, or if it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, binary = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
    return binary if hashlib.sha256(binary).digest() == digest else None


def _write(path: Path, binary: bytes) -> None:
    """Other processes find the whole file or none."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(hashlib.sha256(binary).digest() + binary)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
