"""Settings of Python's garbage collector, which stops all threads: with torch, 100 ms in each full collection."""

import contextlib
import gc
from collections.abc import Iterator

FULL_COLLECTION_THRESHOLD = 1000
# A router holds thousands of short-lived objects per worker step, so young collections are ten times rarer than by
# default (700, 10, 10). Full collections are as frequent.
ROUTER_THRESHOLDS = (7000, 1, 5)


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Turns collections off during imports: saves a tenth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze_objects() -> None:
    """Exempts all current objects from later collections. Call it once start-up is done."""
    gc.collect()
    gc.freeze()


def collect_seldom() -> None:
    """Makes full collections rare, for workers: they free almost nothing but visit every prompt and cached page."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION_THRESHOLD)


def collect_young_seldom() -> None:
    """Makes young collections rare, for routers: most objects are freed without them. Each takes at most 1 ms."""
    gc.set_threshold(*ROUTER_THRESHOLDS)
