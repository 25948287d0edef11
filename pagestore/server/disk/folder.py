"""The folder of a disk tier: its owner, its lock and the record of purges.

Names and purges: a segment's head names its folder and the number of purges before it began. A purge raises the number
in the file `state`, so no segment of before is valid any more, whenever the process dies.
"""

import contextlib
import errno
import fcntl
import os
import stat
import struct
import zlib
from pathlib import Path

_LOCK, _STATE = "lock", "state"
_NAME_BYTES = 16
# Random name of the folder, number of purges; then their checksum.
_FIELDS = struct.Struct(f"<{_NAME_BYTES}sQ")
_CHECKSUM = struct.Struct("<I")


def open_folder(directory: Path, *, make: bool = True) -> int:
    """Opens a folder that belongs to this user alone. Returns its descriptor.

    Args:
        make: makes it (0700) if it is not there. Without, it was fit before: whatever is wrong now is a failing disk.

    Raises ValueError if the folder cannot be made or is open to others, OSError if the disk fails.
    """
    try:
        if make:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if not make or error.errno in (errno.EIO, errno.EROFS, errno.ENOSPC, errno.ESTALE, errno.ENXIO, errno.ENODEV):
            raise
        reason = "not a folder" if isinstance(error, FileExistsError) else error.strerror
        raise ValueError(
            f"{directory} cannot be used as a folder of pages ({reason}): name another in store_disk"
        ) from error
    about = os.fstat(descriptor)
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        os.close(descriptor)
        refusal = (
            f"{directory} has owner {about.st_uid} and mode {stat.S_IMODE(about.st_mode):04o}, but pages would "
            f"lie there in the clear: give it owner {os.geteuid()} and mode 0700, or name another folder"
        )
        raise ValueError(refusal) if make else PermissionError(errno.EPERM, refusal)
    return descriptor


class FolderInUse(ValueError):
    """Another store holds the folder."""


class Folder:
    """A folder that one store holds.

    Attributes:
        descriptor: all paths are relative to it, so a folder that replaces this one is never touched.
        name: random, in hexadecimal digits; a new one if the record was lost.
        num_purges: since the folder has this name.
        num_recorded: those of them that `record_purges` has carried out.
    """

    def __init__(self, directory: Path, *, make: bool = True) -> None:
        """As `open_folder`; raises FolderInUse, too."""
        self.path = directory
        with contextlib.ExitStack() as undo:
            self.descriptor = open_folder(directory, make=make)
            undo.callback(os.close, self.descriptor)
            self._lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT, 0o600, dir_fd=self.descriptor)
            undo.callback(os.close, self._lock)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FolderInUse(
                    f"{directory} is in use by another page store: give each a folder of its own"
                ) from None
            self._state = self._open_state()
            self.num_recorded = self.num_purges
            undo.pop_all()

    def record_purges(self) -> None:
        """Writes `num_purges` down, which makes all segments of before invalid: from here on for this process's death,
        after `sync` for the machine's.

        Raises OSError.
        """
        num_purges = self.num_purges
        try:
            os.pwrite(self._state, self._record(), 0)
        finally:
            self.num_recorded = num_purges

    def sync(self) -> None:
        """Waits until purges are on the disk. Raises OSError."""
        os.fsync(self._state)

    def close(self) -> None:
        for descriptor in (self._state, self._lock, self.descriptor):
            os.close(descriptor)

    def _open_state(self) -> int:
        try:
            state = os.open(_STATE, os.O_RDWR, dir_fd=self.descriptor)
        except FileNotFoundError:
            state = -1
        record = os.pread(state, _FIELDS.size + _CHECKSUM.size, 0) if state >= 0 else b""
        fields = record[: _FIELDS.size]
        if record and record[_FIELDS.size :] == _CHECKSUM.pack(zlib.crc32(fields)):
            name, self.num_purges = _FIELDS.unpack(fields)
            self.name = name.hex()
            return state
        if state >= 0:
            os.close(state)
        self.name, self.num_purges = os.urandom(_NAME_BYTES).hex(), 0
        return self._new_state()

    def _new_state(self) -> int:
        temporary = f"{_STATE}.new"
        state = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=self.descriptor)
        try:
            os.pwrite(state, self._record(), 0)
            os.fsync(state)
            os.rename(temporary, _STATE, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except OSError:
            os.close(state)
            raise
        return state

    def _record(self) -> bytes:
        fields = _FIELDS.pack(bytes.fromhex(self.name), self.num_purges)
        return fields + _CHECKSUM.pack(zlib.crc32(fields))
