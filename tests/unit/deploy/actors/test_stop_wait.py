"""Waiting for an actor's end."""

import threading

from tandem.deploy.actors.stop_wait import StopWait


def test_a_new_waiter_releases_the_previous_one() -> None:
    stop = StopWait()
    returned = [threading.Event(), threading.Event()]

    def wait(number: int) -> None:
        stop.wait()
        returned[number].set()

    for number in range(2):
        threading.Thread(target=wait, args=(number,), daemon=True).start()
        # The second waiter releases the first, in either order.
    while not any(event.is_set() for event in returned):
        threading.Event().wait(0.01)
    assert not all(event.is_set() for event in returned)
    stop.set()
    assert all(event.wait(5.0) for event in returned)
    stop.wait()
