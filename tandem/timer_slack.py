"""How exactly a thread sleeps."""

import ctypes

# Linux's PR_SET_TIMERSLACK.
_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000


def sleep_exactly() -> None:
    """Has the kernel wake the calling thread when it asks for it: by default it may be 50 microseconds late."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
