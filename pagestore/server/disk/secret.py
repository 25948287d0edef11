"""A secret that outlives the cluster: cache namespaces made with it name the same pages after a restart."""

import os
import stat
from pathlib import Path

from tandem.pagestore.server.disk.folder import open_folder

SECRET_BYTES = 32
_NAME = "secret"


def namespace_secret(directory: Path) -> str:
    """Returns the folder's secret, in hexadecimal digits, and makes it on the first call. Any process may call this.

    Raises ValueError if the folder or the secret is open to others or damaged, OSError if the disk fails.
    """
    folder = open_folder(directory)
    try:
        try:
            return _read(folder, directory / _NAME)
        except FileNotFoundError:
            _make(folder, os.urandom(SECRET_BYTES))
            return _read(folder, directory / _NAME)
    finally:
        os.close(folder)


def keep_secret(folder: int, directory: Path, secret: str) -> None:
    """Gives a folder that was emptied under a running cluster the cluster's secret again.

    Args:
        folder: open descriptor.
        directory: for messages.

    Raises ValueError: it has another secret, so its pages are not the cluster's; OSError: the disk fails.
    """
    path = directory / _NAME
    try:
        own = _read(folder, path)
    except FileNotFoundError:
        _make(folder, bytes.fromhex(secret))
        own = _read(folder, path)
    if own != secret:
        raise ValueError(f"{path} is not the secret that this cluster began with: another folder took its place")


def _read(folder: int, path: Path) -> str:
    descriptor = os.open(_NAME, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
    try:
        about = os.fstat(descriptor)
        secret = os.read(descriptor, SECRET_BYTES + 1)
    finally:
        os.close(descriptor)
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise ValueError(
            f"{path} has mode {stat.S_IMODE(about.st_mode):04o}: give it mode 0600 and owner {os.geteuid()}"
        )
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"{path} is damaged: remove it; pages of cache namespaces are then computed anew")
    return secret.hex()


def adopt_secret(directory: Path, secret: str) -> None:
    """Replaces the folder's secret with that of another node's folder.

    Pages whose namespace was made with the old secret are not found again.

    Raises ValueError if the folder is open to others, OSError if the disk fails.
    """
    folder = open_folder(directory)
    try:
        temporary = _write(folder, bytes.fromhex(secret))
        os.rename(temporary, _NAME, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    finally:
        os.close(folder)


def _make(folder: int, secret: bytes) -> None:
    """Makes the secret, unless another process is faster. No process ever sees a part of it."""
    temporary = _write(folder, secret)
    try:
        os.link(temporary, _NAME, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    except FileExistsError:
        pass
    finally:
        os.unlink(temporary, dir_fd=folder)


def _write(folder: int, secret: bytes) -> str:
    """Returns the name of a new file."""
    temporary = f"{_NAME}.{os.urandom(8).hex()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    try:
        os.write(descriptor, secret)
        os.fsync(descriptor)
    except OSError:
        os.unlink(temporary, dir_fd=folder)
        raise
    finally:
        os.close(descriptor)
    return temporary
