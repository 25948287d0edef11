"""Memory shared by the ranks of a worker."""

import mmap
import os
import platform

from tandem.engine.ranks.progress import Progress
from tandem.engine.ranks.ring import Ring


class RankMemory:
    """Mapped by each rank. It has no name, so it ends with the processes.

    Attributes:
        fd: descriptor that followers inherit.
        progress: of all ranks.
        ring: records of forward passes, from the leader to the followers.
    """

    def __init__(self, fd: int, degree: int, wait_timeout_s: float) -> None:
        """
        Args:
            fd: made by `create`; this object closes it.
            wait_timeout_s: the leader's longest wait for a follower.
        """
        self.fd = fd
        self._map = mmap.mmap(fd, _num_bytes(degree))
        self._view = memoryview(self._map)
        self.progress = Progress(self._view, degree)
        self._behind = self._view[Progress.num_bytes(degree) :]
        self.ring = Ring(self._behind, degree - 1, wait_timeout_s)

    @classmethod
    def create(cls, degree: int, wait_timeout_s: float) -> "RankMemory":
        """Raises ValueError: this host's processor does not keep the order of stores."""
        if platform.machine() != "x86_64":
            raise ValueError(
                f"ranks rely on x86-64, where a core sees another's stores in order, but this is {platform.machine()}: "
                "use `tp` 1"
            )
        fd = os.memfd_create("tandem-ranks")
        os.ftruncate(fd, _num_bytes(degree))
        return cls(fd, degree, wait_timeout_s)

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
