"""Python's garbage collector, which stops every thread of the process while it looks at objects.

A full collection takes 100 ms where torch is imported, and so many milliseconds come between two tokens.
"""

import contextlib
import gc
from collections.abc import Iterator

# Full collections come a hundred times less often than by default, where this is 10.
FULL_COLLECTION_THRESHOLD = 1000
# A router has thousands of objects in hand for a moment at each step of its workers; that alone is no reason to look at
# them. Full collections come as often as by default, where these numbers are 700, 10 and 10.
ROUTER_THRESHOLDS = (7000, 1, 5)


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """For imports: next to all that they make stays, and looking at it again and again takes a tenth of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze_objects() -> None:
    """To be called when all has been made that lives as long as the process: collections pass it over from now on."""
    gc.collect()
    gc.freeze()


def collect_seldom() -> None:
    """For workers. Next to nothing of what they make is in cycles, so that full collections find hardly anything; but
    they would read every prompt in hand and every page of the tree."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION_THRESHOLD)


def collect_young_seldom() -> None:
    """For routers. A young collection finds nearly all objects gone by themselves, and takes a millisecond at most."""
    gc.set_threshold(*ROUTER_THRESHOLDS)
