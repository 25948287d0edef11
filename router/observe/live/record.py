"""What a router remembers of the last minutes for whoever looks at it: little, and at no cost that grows with load."""

from tandem.router.observe.histograms import TTFT_SECONDS, Histogram
from tandem.router.observe.live.ended_requests import EndedRequests
from tandem.router.observe.live.journal import Journal


class LiveRecord:
    """
    Attributes:
        journal: faults and restarts.
        ended: the requests that have ended last.
        ttft: times to first token, counted when the token goes out: of the metrics' histogram a request is part when it
            has ended, which may be minutes later.
    """

    def __init__(self) -> None:
        self.journal = Journal()
        self.ended = EndedRequests()
        self.ttft = Histogram("", TTFT_SECONDS)
