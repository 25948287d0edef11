"""A recording of `tandem trace`, read again: which slices each process has on which track, and who has an interval."""

import bisect
import gzip
import itertools
import json
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_GZIP_MAGIC = b"\x1f\x8b"


class Span(NamedTuple):
    """A slice of a trace. Attributes: start, end: in microseconds from the trace's beginning."""

    name: str
    start: float
    end: float
    request_ids: tuple[str, ...] = ()
    detail: str = ""


class Track:
    """Slices by start that do not overlap, such as those of a thread."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = sorted(spans, key=lambda span: (span.start, span.end))
        self._starts = [span.start for span in self.spans]

    def begins_by(self, moment: float) -> bool:
        """Whether there is a slice that began by then."""
        return bool(self._starts) and self._starts[0] <= moment

    def within(self, start: float, end: float) -> Iterator[tuple[str, float, float]]:
        """The parts of slices that lie between two moments, with their names."""
        place = max(bisect.bisect_right(self._starts, start) - 1, 0)
        while place < len(self.spans) and self.spans[place].start < end:
            span = self.spans[place]
            first, last = max(span.start, start), min(span.end, end)
            if last > first:
                yield span.name, first, last
            place += 1

    def backwards_from(self, moment: float) -> Iterator[Span]:
        """Those that begin by then, the latest first."""
        return (self.spans[place] for place in range(bisect.bisect_right(self._starts, moment) - 1, -1, -1))

    def ending_from(self, moment: float) -> Iterator[Span]:
        """Those that end then or later."""
        place = max(bisect.bisect_right(self._starts, moment) - 1, 0)
        return (span for span in itertools.islice(self.spans, place, None) if span.end >= moment)


def read_trace(file: Path) -> dict[str, Any]:
    """Of `tandem trace`, compressed or not. Raises ValueError if it is none."""
    try:
        content = file.read_bytes()
        trace = json.loads(gzip.decompress(content) if content.startswith(_GZIP_MAGIC) else content)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, zlib.error) as error:
        raise ValueError(f"{file} is no trace: {error}") from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{file} is no trace: it has no events")
    return trace


def tracks_of(trace: Mapping[str, Any]) -> dict[str, dict[str, list[Span]]]:
    """The slices by the processes' names and the tracks' names, those of all lines of a track together."""
    processes: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "M" and event["name"] == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    tracks: dict[str, dict[str, list[Span]]] = {name: defaultdict(list) for name in processes.values()}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            arguments = event["args"]
            span = Span(
                event["name"],
                event["ts"],
                event["ts"] + event["dur"],
                tuple(arguments.get("requests", ())),
                arguments.get("detail", ""),
            )
            tracks[processes[event["pid"]]][threads[event["pid"], event["tid"]]].append(span)
    return tracks
