"""Converts a recording to trace events, the JSON of Perfetto (docs/tracing.md)."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import floor
from typing import Any

from tandem.lifecycle import phase_timings
from tandem.recording import DEVICE, ENGINE, HANDOVERS, INBOX, REQUESTS
from tandem.v1 import recording_pb2 as pb

Event = dict[str, Any]

# From top to bottom; unknown tracks rank with the last one.
_TRACKS = (REQUESTS, ENGINE, INBOX, DEVICE, HANDOVERS)
_ROLES = ("router", "prefill", "decode", "both")
# A request's arrows connect these slices in order of time.
_LINKED_PHASE = "prefill_queue"
_LINKED = {"prefill", "copy", "commit", "decode", "mixed"}


@dataclass
class _Process:
    role: str
    slices: list[pb.RecordedSlice] = field(default_factory=list)
    num_dropped: int = 0
    failure: str = ""
    clock_offset_ns: int = 0


class Trace:
    def __init__(self) -> None:
        self.num_slices = 0
        self._processes: dict[str, _Process] = {}

    def add(self, part: pb.RecordedPart) -> None:
        process = self._processes.setdefault(part.process, _Process(part.role))
        process.slices.extend(part.slices)
        process.num_dropped += part.num_dropped
        process.failure = part.failure or process.failure
        if part.HasField("clock_offset_ns"):
            process.clock_offset_ns = part.clock_offset_ns
        self.num_slices += len(part.slices)

    @property
    def warnings(self) -> list[str]:
        lost = [f"{name}: {p.failure}" for name, p in self._processes.items() if p.failure]
        dropped = [
            f"{name}: {p.num_dropped} slices did not fit: record for a shorter time"
            for name, p in self._processes.items()
            if p.num_dropped
        ]
        return lost + dropped

    def as_json(self) -> dict[str, Any]:
        """Time 0 is the first slice."""
        starts = [s.start_ns - p.clock_offset_ns for p in self._processes.values() for s in p.slices]
        origin_ns = min(starts, default=0)
        events: list[Event] = []
        arrows: dict[str, list[Event]] = defaultdict(list)
        order = sorted(self._processes.items(), key=lambda item: (_rank(item[1].role, _ROLES), item[0]))
        for pid, (name, process) in enumerate(order, 1):
            label = name if process.role == "router" else f"{name} ({process.role})"
            events.append(_named("process_name", pid, 0, name=label))
            events.append(_named("process_sort_index", pid, 0, sort_index=pid))
            for event, request_ids in _process_events(pid, process, origin_ns + process.clock_offset_ns):
                events.append(event)
                for request_id in request_ids:
                    arrows[request_id].append(event)
        for number, slices in enumerate(arrows.values(), 1):
            events += _arrows(number, slices)
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"started_ns": str(origin_ns), "warnings": self.warnings},
        }


def _process_events(pid: int, process: _Process, origin_ns: int) -> Iterator[tuple[Event, Iterable[str]]]:
    """Yields each event and the requests whose arrows touch it. origin_ns is time 0 on the process's clock."""
    tracks: dict[str, list[pb.RecordedSlice]] = defaultdict(list)
    for kept in process.slices:
        tracks[kept.track].append(kept)
    tid = 0
    for track in sorted(tracks, key=lambda name: (_rank(name, _TRACKS), name)):
        slices = sorted(tracks[track], key=lambda s: (s.start_ns, -s.duration_ns))
        first = tid + 1
        if track == DEVICE:
            _follow_each_other(slices)
        # Slices of a thread nest. Other overlapping slices need separate lines.
        lanes = [0] * len(slices) if track == ENGINE else _lanes(slices)
        for kept, lane in zip(slices, lanes, strict=True):
            if first + lane > tid:
                tid = first + lane
                yield _named("thread_name", pid, tid, name=track), ()
                yield _named("thread_sort_index", pid, tid, sort_index=tid), ()
            is_linked = track != ENGINE and kept.name in _LINKED
            yield _slice(pid, first + lane, kept, origin_ns), kept.request_ids if is_linked else ()
            if track == REQUESTS:
                for phase in _phases(pid, first + lane, kept, origin_ns):
                    yield phase, kept.request_ids if phase["name"] == _LINKED_PHASE else ()


def _follow_each_other(slices: list[pb.RecordedSlice]) -> None:
    """Moves the start of each forward pass behind the end of the previous one."""
    end_ns = 0
    for kept in slices:
        own_end_ns = kept.start_ns + kept.duration_ns
        kept.start_ns = max(kept.start_ns, end_ns)
        end_ns = max(kept.start_ns + 1, own_end_ns)
        kept.duration_ns = end_ns - kept.start_ns


def _lanes(slices: Iterable[pb.RecordedSlice]) -> list[int]:
    """Args: slices: ordered by start."""
    ends: list[int] = []
    lanes = []
    for kept in slices:
        lane = next((i for i, end_ns in enumerate(ends) if end_ns <= kept.start_ns), len(ends))
        if lane == len(ends):
            ends.append(0)
        ends[lane] = kept.start_ns + max(1, kept.duration_ns)
        lanes.append(lane)
    return lanes


def _slice(pid: int, tid: int, kept: pb.RecordedSlice, origin_ns: int) -> Event:
    arguments: dict[str, Any] = dict(kept.numbers)
    if kept.track == REQUESTS:
        arguments = {name: value for name, value in arguments.items() if not _is_moment(value)}
    if kept.request_tokens:
        arguments["requests"] = dict(zip(kept.request_ids, kept.request_tokens, strict=True))
    elif kept.request_ids:
        arguments["requests"] = list(kept.request_ids)
    if kept.detail:
        arguments["detail"] = kept.detail
    # Perfetto shows no slice without duration.
    duration_ns = kept.duration_ns if kept.track == ENGINE else max(1, kept.duration_ns)
    return _complete(pid, tid, kept.name, kept.start_ns - origin_ns, duration_ns, arguments)


def _phases(pid: int, tid: int, kept: pb.RecordedSlice, origin_ns: int) -> Iterator[Event]:
    moments = {name: value for name, value in kept.numbers.items() if _is_moment(value)}
    for phase in phase_timings(moments):
        start_ns, end_ns = (round(ms * 1e6) for ms in (phase.start_ms, phase.start_ms + phase.duration_ms))
        if phase.on_critical_path and end_ns > start_ns:
            yield _complete(pid, tid, phase.name, kept.start_ns + start_ns - origin_ns, end_ns - start_ns, {})


def _is_moment(value: int) -> bool:
    return value > 10**15


def _arrows(number: int, slices: list[Event]) -> Iterator[Event]:
    """Connects each slice to the next. An arrow's end belongs to the slice running then."""
    ends = sorted(((event["ts"] + event["dur"] / 2, event) for event in slices), key=lambda end: end[0])
    if len(ends) < 2:
        return
    for place, (ts, event) in enumerate(ends):
        kind = "s" if place == 0 else "f" if place == len(ends) - 1 else "t"
        yield {
            "ph": kind,
            "name": "request",
            "cat": "request",
            "id": number,
            "pid": event["pid"],
            "tid": event["tid"],
            # Rounded down to nanoseconds: the end of a slice is outside it.
            "ts": floor(ts * 1000) / 1000,
            "bp": "e",
        }


def _complete(pid: int, tid: int, name: str, start_ns: int, duration_ns: int, arguments: dict[str, Any]) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": "tandem",
        "pid": pid,
        "tid": tid,
        "ts": start_ns / 1000,
        "dur": duration_ns / 1000,
        "args": arguments,
    }


def _named(what: str, pid: int, tid: int, **arguments: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": arguments}


def _rank(name: str, order: tuple[str, ...]) -> int:
    return order.index(name) if name in order else len(order) - 1
