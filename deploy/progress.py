"""Shows a person what each part of a starting cluster is doing."""

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

DONE = ("ready",)


class StartProgress:
    """A live table on a terminal; a line for each change elsewhere. Use as a context manager and call it with the
    name of a part and what it is doing."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        # What each part does, and when it began or, once ready, how long it took.
        self._parts: dict[str, tuple[str, float]] = {}
        self._began: dict[str, float] = {}
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
        else:
            self._console.print(f"{now - self._started:6.1f} s  {part}: {doing}", highlight=False)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for part, (doing, took) in self._parts.items():
            if doing in DONE:
                table.add_row("[green]✓[/]", part, f"ready after {took:.1f} s")
            else:
                table.add_row(Spinner("dots"), part, doing)
        return table
