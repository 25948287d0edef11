"""Python's garbage collector, which stops every thread of the process while it looks at objects."""

import gc

# Full collections come so many times less often than by default (10). On a host with torch one that looks at all that
# is imported takes 100 ms, and so many milliseconds come between two tokens.
FULL_COLLECTION_THRESHOLD = 1000


def shorten_pauses() -> None:
    """To be called when all has been made that lives as long as the process: collections pass it over from now on.

    What a worker makes later is in no cycles, so that full collections have next to nothing to find; but they would
    read every prompt in hand and every page of the tree.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION_THRESHOLD)
