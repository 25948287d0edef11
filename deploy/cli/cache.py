"""`tandem cache`: the models converted from GGUF files."""

import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tandem import exit_codes
from tandem.engine.weights.conversions import Conversion, ConversionCache, default_directory

_GB = 1e9
# An age has at least two of its unit.
_UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))


def run_cache(action: str) -> int:
    cache = ConversionCache(default_directory())
    try:
        if action == "path":
            print(cache.directory)
        elif action == "clear":
            gone = cache.clear()
            print(f"Removed {_amount(gone)} from {cache.directory}")
            for left in cache.conversions():
                print(f"Left {left.path.name}: a running cluster uses it" if left.is_held else f"Left {left.path.name}")
        else:
            _print_list(cache)
    except OSError as error:
        print(f"tandem cache: {error}", file=sys.stderr)
        return exit_codes.FAILED
    return 0


def _print_list(cache: ConversionCache) -> None:
    found = cache.conversions()
    print(f"{cache.directory}: {_amount(found)}")
    if not found:
        return
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("model", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("last used", no_wrap=True)
    table.add_column("")
    now = time.time()
    for conversion in found:
        state = "in use" if conversion.is_held else ""
        table.add_row(conversion.path.name, _size(conversion.num_bytes), _ago(now - conversion.used_at), state)
    Console(highlight=False).print(table)


def _amount(conversions: Sequence[Conversion]) -> str:
    what = "converted model" if len(conversions) == 1 else "converted models"
    return f"{len(conversions)} {what}, {_size(sum(conversion.num_bytes for conversion in conversions))}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GB:.2f} GB"


def _ago(seconds: float) -> str:
    for name, length_s in _UNITS:
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {name} ago"
    return "just now"
