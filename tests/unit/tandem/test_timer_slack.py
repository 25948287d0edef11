import ctypes
import threading

from tandem.timer_slack import sleep_exactly

PR_GET_TIMERSLACK = 30


def test_the_calling_thread_alone_sleeps_more_exactly() -> None:
    def slack_ns() -> int:
        return ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)

    here, there = slack_ns(), []
    thread = threading.Thread(target=lambda: (sleep_exactly(), there.append(slack_ns())))
    thread.start()
    thread.join()
    assert there == [1000] and slack_ns() == here > 1000
