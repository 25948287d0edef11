"""Locks on the names of this host's clusters."""

import fcntl
import os
from pathlib import Path
from typing import TextIO

from tandem.private_directory import check_private


class ClusterName:
    """A taken name, until `close` or the end of the process."""

    def __init__(self, directory: Path, name: str) -> None:
        """
        Raises:
            NameTakenError: another cluster has the name.
            PermissionError: other users can write to the directory.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(directory)
        self._path = directory / f"{name}.name"
        self._file = self._lock()

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()

    def _lock(self) -> TextIO:
        while True:
            file = self._path.open("a")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.close()
                raise NameTakenError(self._path.stem) from error
            try:
                # The previous holder may have removed the file after it was opened here.
                if os.fstat(file.fileno()).st_ino == self._path.stat().st_ino:
                    return file
            except FileNotFoundError:
                pass
            file.close()


class NameTakenError(Exception):
    """Another cluster has the name."""
