"""Shows the progress of each part of a starting cluster."""

import re
import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

DONE = ("ready",)
BAR_WIDTH = 24
# Without a terminal, running stages are printed again after this silence.
SILENCE_S = 2.0
_LOOK_INTERVAL_S = 0.2
# "(3 of 35)" or "(1.2 of 16.1 GB)" at the end of a stage.
_AMOUNT = re.compile(r"(?P<stage>.+) \((?P<amount>(?P<done>[\d.]+) of (?P<total>[\d.]+)[^()]*)\)")


class StartProgress:
    """A context manager, called with a part's name and its stage.

    Shows a live table with progress bars on a terminal. Elsewhere it prints a line per stage, and one after SILENCE_S.
    """

    def __init__(
        self, console: Console, started_s_ago: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._clock = clock
        self._started = clock() - started_s_ago
        # Stage, and seconds from the part's beginning to the stage's.
        self._parts: dict[str, tuple[str, float]] = {}
        self._began: dict[str, float] = {}
        self._printed_at = clock()
        self._live = Live(console=console, refresh_per_second=8, transient=False)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._break_silences, name="start-progress", daemon=True)

    @property
    def seconds(self) -> float:
        return self._clock() - self._started

    def __enter__(self) -> "StartProgress":
        if self._console.is_terminal:
            self._live.start()
        else:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        else:
            self._ended.set()
            self._thread.join()

    def __call__(self, part: str, doing: str) -> None:
        now = self._clock()
        self._began.setdefault(part, now)
        before = self._parts.get(part, ("", 0.0))[0]
        if before == doing:
            return
        with self._lock:
            self._parts[part] = (doing, now - self._began[part])
            if self._console.is_terminal:
                self._live.update(self._table())
            elif _name(doing) != _name(before):
                self._print(f"{part}: {doing}")

    def break_silence(self) -> None:
        with self._lock:
            going_on = [f"{part}: {doing}" for part, (doing, _) in self._parts.items() if doing not in DONE]
            if going_on and self._clock() - self._printed_at >= SILENCE_S:
                self._print(", ".join(going_on))

    def _break_silences(self) -> None:
        while not self._ended.wait(_LOOK_INTERVAL_S):
            self.break_silence()

    def _print(self, text: str) -> None:
        self._printed_at = self._clock()
        self._console.print(f"{self.seconds:6.1f} s  {text}", highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for part, (doing, took) in self._parts.items():
            if doing in DONE:
                table.add_row("[green]✓[/]", part, f"ready after {took:.1f} s")
            else:
                table.add_row(Spinner("dots"), part, *_stage(doing))
        return table


def _name(doing: str) -> str:
    return doing.partition(" (")[0]


def _stage(doing: str) -> tuple[RenderableType, ...]:
    match = _AMOUNT.fullmatch(doing)
    if match is None:
        return (doing,)
    bar = ProgressBar(total=float(match["total"]), completed=float(match["done"]), width=BAR_WIDTH)
    return match["stage"], bar, match["amount"]
