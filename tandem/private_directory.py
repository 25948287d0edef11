"""Directories that only this user may write to."""

import os
import stat
from pathlib import Path


def check_private(directory: Path) -> None:
    """Raises PermissionError: other users can write to the directory, and so choose what this process takes from it."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{directory} must be a directory, not a link, that belongs to user {os.getuid()} "
            "and that no other user can write to"
        )
