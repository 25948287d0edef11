"""Ends a worker that stands still."""

import asyncio
import logging
import os
from collections.abc import Callable

from tandem import exit_codes

logger = logging.getLogger(__name__)


async def end_when_stalled(num_steps: Callable[[], int], timeout_s: float, interval_s: float) -> None:
    """Ends the process after timeout_s without a scheduler step. Its requests run elsewhere by then, and a reconnect
    would attract new ones."""
    loop = asyncio.get_running_loop()
    last, moved_at = -1, loop.time()
    while True:
        if (now_at := num_steps()) != last:
            last, moved_at = now_at, loop.time()
        elif loop.time() - moved_at > timeout_s:
            logger.error("no scheduler step for %.0f s", timeout_s)
            logging.shutdown()
            os._exit(exit_codes.STALLED)
        await asyncio.sleep(interval_s)
