"""Thread of a follower that drives its lanes or its store copies, so that a long launch does not delay them."""

import logging
import os
import threading
import time
from collections.abc import Callable

from tandem import exit_codes
from tandem.timer_slack import sleep_exactly
from tandem.worker.base import LaneDriver
from tandem.worker.ranks.channel import MessageChannel

logger = logging.getLogger(__name__)

# Interval between looks at copies under way, in seconds.
BUSY_POLL_S = 1e-4
# Longest interval between beats, in seconds.
IDLE_WAIT_S = 0.1
BUILD_TIMEOUT_S = 60.0


class LaneThread:
    """Ends with the process."""

    def __init__(
        self,
        build: Callable[[], LaneDriver | None],
        channel: MessageChannel,
        beat: Callable[[], None],
        name: str = "lanes",
    ) -> None:
        """
        Args:
            build: called on the thread; returns None for a worker without links.
            beat: shows that the thread moves.
            name: of the thread.
        """
        self._name = name
        self._build = build
        self._channel = channel
        self._beat = beat
        self._built = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait_built(self) -> None:
        """Returns once the driver is built, and the thread beats. Raises TimeoutError."""
        if not self._built.wait(BUILD_TIMEOUT_S):
            raise TimeoutError(f"the transports were not loaded within {BUILD_TIMEOUT_S:g} s")

    def _run(self) -> None:
        sleep_exactly()
        try:
            driver = self._build()
            self._beat()
            self._built.set()
            while True:
                self._beat()
                self._turn(driver)
        except ConnectionError:
            logger.info("the leader has ended")
        except BaseException:
            # Copies may still touch pages, and nobody would report their end.
            logger.exception("the %s failed", self._name)
            logging.shutdown()
            os._exit(exit_codes.RANK_FAILED)

    def _turn(self, driver: LaneDriver | None) -> None:
        messages = self._channel.receive()
        if driver is None:
            assert not messages
            self._channel.wait(IDLE_WAIT_S)
            return
        for message in messages:
            driver.obey(message)
        for report in driver.poll():
            self._channel.send(report)
        if driver.is_busy:
            time.sleep(BUSY_POLL_S)
        elif not messages:
            self._channel.wait(IDLE_WAIT_S)
