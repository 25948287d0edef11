"""Values of the page store's options."""

import re
from pathlib import Path

from tandem.pagestore.config import StoreDisk

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(rf"([1-9][0-9]{{0,14}}) ?({'|'.join(_UNITS)})")


def parse_size(field: str, text: str) -> int:
    """Returns a size in bytes. Raises ValueError: it is none; the message names `field`."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"{field} must be a size such as 64GiB, a whole number of {', '.join(_UNITS)}, not {text!r}")
    return int(found[1]) * _UNITS[found[2]]


def parse_disk(field: str, text: str) -> StoreDisk:
    """Parses "DIR:SIZE". Raises ValueError: it is not that; the message names `field`."""
    directory, separator, size = text.rpartition(":")
    if not directory or not separator:
        raise ValueError(f"{field} must be a directory and a size, such as /data/pages:500GiB, not {text!r}")
    return StoreDisk(str(Path(directory).absolute()), parse_size(f"the size of {field}", size))
