"""The names of the clusters that run on this host: each is one cluster's at a time."""

import fcntl
import os
from pathlib import Path
from typing import TextIO

from tandem.deploy.host.run_record import check_private


class ClusterName:
    """A name, from when it is taken until it is let go, or the process ends."""

    def __init__(self, directory: Path, name: str) -> None:
        """
        Args:
            directory: of this user's clusters.

        Raises:
            NameTakenError: another cluster has it.
            PermissionError: the directory is not this user's alone.
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
                # Whoever had it may have removed the file between the two steps.
                if os.fstat(file.fileno()).st_ino == self._path.stat().st_ino:
                    return file
            except FileNotFoundError:
                pass
            file.close()


class NameTakenError(Exception):
    """A cluster of that name runs already."""
