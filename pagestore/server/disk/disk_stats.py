from typing import NamedTuple


class DiskStats(NamedTuple):
    """
    Attributes:
        num_bytes: of all segments; the one being written counts in full.
        num_pages: found in the tier.
        num_read, num_written: pages, without failures.
        num_failed: transfers that ended with ok=False.
        read_s, write_s: time of all io threads together.
        is_off: a failure has turned the tier off, until the store restarts.
    """

    num_bytes: int
    num_pages: int
    num_read: int
    num_written: int
    num_failed: int
    read_s: float
    write_s: float
    is_off: bool
