"""Python's garbage collector, which stops every thread of the process while it looks at objects."""

import gc

# Full collections come a hundred times less often than by default, where this is 10. On a host with torch one that
# looks at all that is imported takes 100 ms, and so many milliseconds come between two tokens.
FULL_COLLECTION_THRESHOLD = 1000


def shorten_pauses() -> None:
    """To be called when all has been made that lives as long as the process: collections pass it over from now on.

    Next to nothing of what a worker makes later is in cycles, so that full collections find hardly anything; but they
    would read every prompt in hand and every page of the tree.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION_THRESHOLD)
