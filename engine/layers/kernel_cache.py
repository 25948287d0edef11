"""Kernels that earlier processes compiled, in files."""

import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tandem.engine.weights.conversions import default_directory
from tandem.private_directory import check_private

logger = logging.getLogger(__name__)

_DIGEST_SIZE = hashlib.sha256().digest_size


def cache_directory() -> Path:
    """Returns ``$TANDEM_KERNEL_CACHE``, else ``kernels`` in Tandem's directory of caches."""
    if own := os.environ.get("TANDEM_KERNEL_CACHE"):
        return Path(own).expanduser()
    return default_directory() / "kernels"


def key_of(compiler: str, arguments: Sequence[str], name: str, source: bytes, headers: Mapping[str, bytes]) -> str:
    """Returns a name for all that decides a binary.

    Args:
        compiler: with its version.
        headers: by name, all that the source may include.
    """
    digest = hashlib.sha256()

    def add(*parts: bytes) -> None:
        for part in (str(len(parts)).encode(), *parts):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)

    add(compiler.encode(), name.encode(), source)
    add(*(argument.encode() for argument in arguments))
    for header, text in sorted(headers.items()):
        add(header.encode(), text)
    return digest.hexdigest()


def cached(key: str, compile_kernel: Callable[[], bytes]) -> bytes:
    """Returns the binary of a key, and keeps it. A directory that cannot be used costs only the time to compile."""
    try:
        path = _own(cache_directory()) / f"{key}.cubin"
    except (OSError, RuntimeError) as error:
        _warn(str(error))
        return compile_kernel()
    if (known := _read(path)) is not None:
        return known
    binary = compile_kernel()
    try:
        _write(path, binary)
    except OSError as error:
        _warn(str(error))
    return binary


def _own(directory: Path) -> Path:
    """Makes the directory. Raises OSError if that fails, or if other users can write to it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(directory.resolve())
    return directory


def _read(path: Path) -> bytes | None:
    """Returns None without a file, or if it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, binary = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
    return binary if digest == _digest(path, binary) else None


def _write(path: Path, binary: bytes) -> None:
    """Other processes find the whole file or none."""
    number, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(_digest(path, binary) + binary)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _digest(path: Path, binary: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + binary).digest()


@functools.cache
def _warn(problem: str) -> None:
    """Once for each problem of a process."""
    logger.warning("compiled kernels are not kept for the next start: %s", problem)
