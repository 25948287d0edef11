"""Checks a page store's folder before the cluster starts."""

import contextlib
import os
from pathlib import Path

from tandem.pagestore.config import StoreDisk
from tandem.pagestore.region import BLOCK_BYTES, GIB
from tandem.pagestore.server.disk.folder import Folder
from tandem.pagestore.server.disk.secret import namespace_secret


def open_disk(disk: StoreDisk) -> str:
    """Checks that a store can use the folder, which is made if it is not there, and that it has room.

    Returns its secret of cache namespaces.

    Raises ValueError if it cannot.
    """
    directory = Path(disk.directory)
    try:
        folder = Folder(directory)
        try:
            room = room_of(folder.descriptor)
        finally:
            folder.close()
        if disk.num_bytes > room:
            raise ValueError(
                f"store_disk may take {disk.num_bytes / GIB:.2f} GiB in {directory}, but only {room / GIB:.2f} GiB are "
                "free there, pages of before included: use a smaller size, or free space"
            )
        return namespace_secret(directory)
    except OSError as error:
        raise ValueError(
            f"{directory} cannot be used as a folder of pages ({error.strerror}): name another in store_disk"
        ) from error


def room_of(folder: int) -> int:
    """Returns the bytes that the files of a folder may take: its file system's free space and what they take now.

    Args:
        folder: descriptor.

    Raises OSError.
    """
    about = os.fstatvfs(folder)
    room = about.f_bavail * about.f_frsize
    with os.scandir(folder) as files:
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                room += file.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
    return room
