import ctypes
import threading
from collections.abc import Callable

from tandem.timer_slack import sleep_exactly

PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30


def in_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_the_calling_thread_alone_sleeps_more_exactly() -> None:
    prctl, slacks_ns = ctypes.CDLL(None).prctl, []

    def note() -> None:
        slacks_ns.append(prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0))

    def sleep_as_by_default() -> None:
        # The thread of the tests may sleep exactly since another one.
        prctl(PR_SET_TIMERSLACK, 50_000, 0, 0, 0)
        in_thread(lambda: (sleep_exactly(), note()))
        note()

    in_thread(sleep_as_by_default)
    assert slacks_ns == [1000, 50_000]
