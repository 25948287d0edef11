"""Python's garbage collector, which stops every thread of the process while it looks at objects.

A full collection takes 100 ms where torch is imported, and so many milliseconds come between two tokens.
"""

import gc

# Full collections come a hundred times less often than by default, where this is 10.
FULL_COLLECTION_THRESHOLD = 1000


def freeze_objects() -> None:
    """To be called when all has been made that lives as long as the process: collections pass it over from now on."""
    gc.collect()
    gc.freeze()


def collect_seldom() -> None:
    """For workers. Next to nothing of what they make is in cycles, so that full collections find hardly anything; but
    they would read every prompt in hand and every page of the tree."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION_THRESHOLD)
