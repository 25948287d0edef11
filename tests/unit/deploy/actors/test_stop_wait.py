"""Who waits for an actor's end."""

import threading

from tandem.deploy.actors.stop_wait import StopWait


def test_who_asks_again_takes_the_place_of_the_one_before() -> None:
    stop = StopWait()
    returned = [threading.Event(), threading.Event()]

    def wait(number: int) -> None:
        stop.wait()
        returned[number].set()

    for number in range(2):
        threading.Thread(target=wait, args=(number,), daemon=True).start()
        # The first is let go by the second, whichever of them is first.
    while not any(event.is_set() for event in returned):
        threading.Event().wait(0.01)
    assert not all(event.is_set() for event in returned)
    stop.set()
    assert all(event.wait(5.0) for event in returned)
    # From now on nobody waits.
    stop.wait()
