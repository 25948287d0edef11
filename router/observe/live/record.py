"""Recent history for the live page. Its cost does not grow with load."""

from tandem.router.observe.histograms import TTFT_SECONDS, Histogram
from tandem.router.observe.live.ended_requests import EndedRequests
from tandem.router.observe.live.journal import Journal


class LiveRecord:
    """
    Attributes:
        journal: faults and restarts.
        ttft: times to first token, counted at the first token. The metrics' histogram counts a request only at its end.
    """

    def __init__(self) -> None:
        self.journal = Journal()
        self.ended = EndedRequests()
        self.ttft = Histogram("", TTFT_SECONDS)
