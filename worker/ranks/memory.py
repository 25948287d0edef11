"""Memory shared by the ranks of a worker."""

import mmap
import os

from tandem.engine.ranks.progress import Progress
from tandem.engine.ranks.ring import Ring


class RankMemory:
    """Mapped by each rank. It has no name, so it ends with the processes.

    Attributes:
        fd: descriptor that followers inherit.
        progress: of all ranks.
        ring: records of forward passes, from the leader to the followers.
    """

    def __init__(self, fd: int, degree: int, stall_timeout_s: float) -> None:
        """
        Args:
            fd: made by `create`; this object closes it.
            stall_timeout_s: the leader's longest wait for a follower.
        """
        self.fd = fd
        self._map = mmap.mmap(fd, _num_bytes(degree))
        self._view = memoryview(self._map)
        self.progress = Progress(self._view, degree)
        self._behind = self._view[Progress.num_bytes(degree) :]
        self.ring = Ring(self._behind, degree - 1, stall_timeout_s)

    @classmethod
    def create(cls, degree: int, stall_timeout_s: float) -> "RankMemory":
        fd = os.memfd_create("tandem-ranks")
        os.ftruncate(fd, _num_bytes(degree))
        return cls(fd, degree, stall_timeout_s)

    def close(self) -> None:
        """All users of the views have ended."""
        self.ring.close()
        self._behind.release()
        self.progress.close()
        self._view.release()
        self._map.close()
        os.close(self.fd)


def _num_bytes(degree: int) -> int:
    return Progress.num_bytes(degree) + Ring.num_bytes(degree - 1)
