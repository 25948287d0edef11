"""How long requests wait while no worker can serve them."""

from tandem.config import RESTART_DELAY_S, WORKER_PROBE_INTERVAL_S, WORKER_SILENCE_LIMIT_S
from tandem.router.config import DERIVED

# From the last sign of a worker that hangs until another is started in its place.
DETECTION_S = WORKER_SILENCE_LIMIT_S + 2 * WORKER_PROBE_INTERVAL_S + RESTART_DELAY_S
# A process, its imports and its connections come on top of loading, which takes longer beside other starts.
START_FACTOR = 1.5
START_MARGIN_S = 30.0
# Taken for a start before any worker has joined.
UNKNOWN_START_S = 60.0
MAX_WAIT_S = 900.0
# Starts of an added worker for which requests wait, whatever they take.
ADDED_FACTOR = 2.0


class WorkerWait:
    """The limit of a request's wait: as configured, or the worst detection plus the longest measured start.

    Attributes:
        first_start_s: time of the start of a worker that is added for waiting requests, as the supervisor measured it;
            0: none is.
    """

    def __init__(self, configured_s: float) -> None:
        self._configured_s = configured_s
        self.first_start_s = 0.0
        # By worker, of its latest life.
        self._start_s: dict[str, float] = {}

    def note_start(self, worker_id: str, start_s: float) -> None:
        """Args: start_s: time that a worker took to load."""
        self._start_s[worker_id] = start_s

    @property
    def limit_s(self) -> float:
        if self._configured_s != DERIVED:
            return self._configured_s
        longest_s = max(self._start_s.values(), default=UNKNOWN_START_S)
        limit_s = min(MAX_WAIT_S, DETECTION_S + START_FACTOR * longest_s + START_MARGIN_S)
        # The start may be planned late, and the first one may fail.
        return max(limit_s, ADDED_FACTOR * self.first_start_s)
