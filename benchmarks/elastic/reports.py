"""A simulated worker's heartbeats and reports of cached prefixes."""

from benchmarks.elastic.attempts import Port
from benchmarks.elastic.pages import PAGE_SIZE, Pages, pack
from tandem.messages import CachedPrefixes, Heartbeat, WorkerStats


class Reports:
    """
    Attributes:
        ports: streams to the routers.
        last_stats: those of the last heartbeat.
    """

    def __init__(self, pages: Pages) -> None:
        self.ports: list[Port] = []
        self.last_stats = WorkerStats()
        self._pages = pages
        self._num_beats = 0

    def beat(self, stats: WorkerStats) -> None:
        self._num_beats += 1
        self.last_stats = stats
        for port in self.ports:
            port.send(Heartbeat(self._num_beats, stats))

    def send_prefixes(self) -> None:
        """Sends the changes since the last report."""
        if (changes := self._pages.take_changes()) is not None:
            for port in self.ports:
                self._send(port, *changes)

    def repeat_prefixes(self, port: Port) -> None:
        port.num_reports = 0
        self._send(port, pack(self._pages.identities), b"")

    @staticmethod
    def _send(port: Port, stored: bytes, removed: bytes) -> None:
        number, port.num_reports = port.num_reports, port.num_reports + 1
        port.send(CachedPrefixes(number, number == 0, stored, removed))


def page_stats(pages: Pages) -> WorkerStats:
    """Returns the figures of a pool alone."""
    return WorkerStats(
        num_total_pages=pages.num_tokens // PAGE_SIZE,
        num_free_pages=max(0, pages.num_free - pages.num_cached) // PAGE_SIZE,
        num_cached_pages=pages.num_cached // PAGE_SIZE,
        num_locked_pages=pages.num_locked // PAGE_SIZE,
    )
