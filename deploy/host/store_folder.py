"""Checks a page store's folder before the cluster starts."""

from pathlib import Path

from tandem.pagestore.config import StoreDisk
from tandem.pagestore.server.disk.folder import Folder
from tandem.pagestore.server.disk.secret import namespace_secret


def open_disk(disk: StoreDisk) -> str:
    """Checks that a store can use the folder, which is made if it is not there. Returns its secret of cache namespaces.

    Raises ValueError if it cannot.
    """
    directory = Path(disk.directory)
    try:
        Folder(directory).close()
        return namespace_secret(directory)
    except OSError as error:
        raise ValueError(
            f"{directory} cannot be used as a folder of pages ({error.strerror}): name another in store_disk"
        ) from error
