"""Shows a person what each part of a starting cluster is doing."""

import re
import time
from types import TracebackType

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

DONE = ("ready",)
BAR_WIDTH = 24
# Where there is no terminal, at least this time lies between two lines about the same stage.
LINE_INTERVAL_S = 5.0
# A stage may say behind its name how much of it is done: "(3 of 35)" or "(1.2 of 16.1 GB)".
_AMOUNT = re.compile(r"(?P<stage>.+) \((?P<amount>(?P<done>[\d.]+) of (?P<total>[\d.]+)[^()]*)\)")


class StartProgress:
    """A live table on a terminal, with a bar where a stage says how much of it is done; lines elsewhere, one for each
    stage and one now and then while it goes on. It is used as a context manager and called with the name of a part and
    what that part is doing."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        # Each part is here with what it is doing, and with the seconds from its beginning until it began that: for one
        # that is ready, these are what it took.
        self._parts: dict[str, tuple[str, float]] = {}
        self._began: dict[str, float] = {}
        # Each part is here with the stage that its last line was about, and with when that was written.
        self._printed: dict[str, tuple[str, float]] = {}
        self._live = Live(console=console, refresh_per_second=8, transient=False)

    def __enter__(self) -> "StartProgress":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def __call__(self, part: str, doing: str) -> None:
        now = time.monotonic()
        self._began.setdefault(part, now)
        if self._parts.get(part, ("", 0.0))[0] == doing:
            return
        self._parts[part] = (doing, now - self._began[part])
        if self._console.is_terminal:
            self._live.update(self._table())
            return
        stage = doing.partition(" (")[0]
        printed, printed_at = self._printed.get(part, ("", 0.0))
        if stage != printed or now - printed_at >= LINE_INTERVAL_S:
            self._printed[part] = (stage, now)
            self._console.print(f"{now - self._started:6.1f} s  {part}: {doing}", highlight=False)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for part, (doing, took) in self._parts.items():
            if doing in DONE:
                table.add_row("[green]✓[/]", part, f"ready after {took:.1f} s")
            else:
                table.add_row(Spinner("dots"), part, *_stage(doing))
        return table


def _stage(doing: str) -> tuple[RenderableType, ...]:
    """A stage's name and, if it says how much of it is done, a bar and the amounts."""
    match = _AMOUNT.fullmatch(doing)
    if match is None:
        return (doing,)
    bar = ProgressBar(total=float(match["total"]), completed=float(match["done"]), width=BAR_WIDTH)
    return match["stage"], bar, match["amount"]
