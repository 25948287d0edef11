"""What each handover of a recording waited for: `tandem trace`'s file, compressed or not, turned into sums.

A handover goes from the first token's sampling to the start of the step of the second token. It is cut into stages that
follow each other without a gap, and each of them into what the engine thread was doing meanwhile that has to see to the
next one:

  push       prefill: the last pages are not pushed yet
  copy       prefill: pages are being copied, or have been and nobody has looked
  settle     prefill: the copies are seen to be over, and Committed is made
  leave      prefill: Committed waits for the thread to hand its messages over
  way        between the two workers; the thread is the decode worker's
  inbox      decode: Committed has come to the decode worker, whose thread has not taken it in
  arrive     decode: Committed is taken in, and pages are still to be seen
  step       decode: the request can run, and its first step has not begun

`(nothing)` is time for which the thread has no slice: what took less than two microseconds is not recorded.

  python -m benchmarks.trace_waits results/steady-3.trace.json.gz
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.trace_slices import Span, Track, read_trace, tracks_of
from tandem.bench.measures import distribution
from tandem.recording import DEVICE, ENGINE, HANDOVERS, INBOX

STAGES = ("push", "copy", "settle", "leave", "way", "inbox", "arrive", "step")
# Of these the prefill worker's thread is what is waited for, of the others the decode worker's.
PREFILL_STAGES = STAGES[:4]
NOTHING = "(nothing)"
_COPIES = "copies to "
# A slice that others of its thread lie within.
_TURN = "step"
# In these a thread waits for a forward, or may.
_MAY_WAIT = ("sleep", "collect")
# Two clocks agree to some hundred microseconds: what is told by one may seem to have happened before its cause.
_CLOCKS_US = 5_000.0


@dataclass(frozen=True, slots=True)
class Waits:
    """One handover, in microseconds.

    Attributes:
        start: of the recording's time.
        stages: how long each took.
        slices: of a stage, what its thread did for how long.
    """

    request_id: str
    start: float
    stages: Mapping[str, float]
    slices: Mapping[tuple[str, str], float]

    @property
    def total(self) -> float:
        return sum(self.stages.values())


@dataclass(slots=True)
class _Worker:
    """Attributes: commits, steps: of a decode worker, by request; copies: of a prefill worker, likewise."""

    thread: Track
    device: Track
    inbox: Track
    handovers: list[Span] = field(default_factory=list)
    commits: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    copies: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, tracks: Mapping[str, Sequence[Span]]) -> "_Worker":
        laps = [span for span in tracks.get(ENGINE, ()) if span.name != _TURN]
        worker = cls(Track(laps), Track(tracks.get(DEVICE, ())), Track(tracks.get(INBOX, ())))
        by_name = {"commit": worker.commits, "wait for step": worker.steps}
        for span in tracks.get(HANDOVERS, ()):
            if span.name == "handover" and not span.detail:
                worker.handovers.append(span)
            elif span.name in by_name:
                by_name[span.name][span.request_ids[0]].append(span)
        for track, spans in tracks.items():
            if track.startswith(_COPIES):
                for span in spans:
                    worker.copies[span.request_ids[0]].append(span)
        return worker

    def doing(self, start: float, end: float) -> dict[str, float]:
        """What the thread did between two moments, by name. While it may have waited for its device, what that ran."""
        took: dict[str, float] = defaultdict(float)
        for name, first, last in self.thread.within(start, end):
            if name in _MAY_WAIT:
                for running, began, ended in self.device.within(first, last):
                    took[f"{name}, device: {running}"] += ended - began
                    took[name] -= ended - began
            took[name] += last - first
        took[NOTHING] = max(0.0, end - start - sum(took.values()))
        return {name: value for name, value in took.items() if value > 1e-6}

    def left_at(self, moment: float) -> float:
        """When messages go out that are there from that moment on: before a forward is launched or collected, at the
        end of a turn, and at once while a forward is being launched."""
        for span in self.thread.ending_from(moment):
            if span.name == "launch" and span.start <= moment:
                return moment
            if span.name == "collect" and span.start >= moment:
                return span.start
            if span.name in ("compose", "tell"):
                return span.end
        return moment

    def waited_in_inbox(self, moment: float) -> float:
        """Since when what is taken in at that moment, or part of it, has been there."""
        return next((span.start for span in self.inbox.backwards_from(moment) if span.end <= moment), moment)


def waits_of(trace: Mapping[str, Any]) -> tuple[list[Waits], int]:
    """All handovers that are in the recording from their first token to their step, by start; and how many are not.
    Those that failed count as neither."""
    workers = {name: _Worker.of(tracks) for name, tracks in tracks_of(trace).items()}
    found, num_partial = [], 0
    for worker in workers.values():
        for handover in worker.handovers:
            waits = _waits(handover, worker, workers.values())
            if waits is None:
                num_partial += 1
            else:
                found.append(waits)
    return sorted(found, key=lambda waits: waits.start), num_partial


def _waits(handover: Span, prefill: _Worker, workers: Iterable[_Worker]) -> Waits | None:
    """None: what came before or after is not in the recording."""
    (request_id,) = handover.request_ids
    arrived = [
        (commit, worker)
        for worker in workers
        for commit in worker.commits.get(request_id, ())
        if commit.start >= handover.end - _CLOCKS_US
    ]
    if not arrived:
        return None
    commit, decode = min(arrived, key=lambda one: one[0].start)
    begun = [step for step in decode.steps.get(request_id, ()) if step.end >= commit.end]
    if not begun or not all(worker.thread.begins_by(handover.start) for worker in (prefill, decode)):
        return None
    step = min(begun, key=lambda one: one.end)
    copies = [copy for copy in prefill.copies.get(request_id, ()) if copy.start <= handover.end]
    left = prefill.left_at(handover.end)
    moments = [
        handover.start,
        # What the last chunk's pages wait for: with nothing to push, nothing is waited for.
        max((copy.start for copy in copies), default=handover.start),
        max((copy.end for copy in copies), default=handover.start),
        handover.end,
        left,
        decode.waited_in_inbox(commit.start),
        commit.start,
        commit.end,
        step.end,
    ]
    for place in range(1, len(moments)):
        moments[place] = max(moments[place], moments[place - 1])
    stages, slices = {}, {}
    for stage, (start, end) in zip(STAGES, pairwise(moments), strict=True):
        stages[stage] = end - start
        thread = prefill if stage in PREFILL_STAGES else decode
        slices.update({(stage, name): took for name, took in thread.doing(start, end).items()})
    return Waits(request_id, handover.start, stages, slices)


def summarize(handovers: Sequence[Waits]) -> dict[str, Any]:
    """Distributions over all handovers, in milliseconds: of the whole, of each stage, of what each worker's thread did,
    and of that in each stage. A handover that had none of something counts as 0 there."""
    by_worker: list[dict[tuple[str, str], float]] = []
    for one in handovers:
        sums: dict[tuple[str, str], float] = defaultdict(float)
        for (stage, name), took in one.slices.items():
            sums["prefill" if stage in PREFILL_STAGES else "decode", name] += took
        by_worker.append(sums)
    return {
        "total": _ms([one.total for one in handovers]),
        "stages": {stage: _ms([one.stages[stage] for one in handovers]) for stage in STAGES},
        "threads": _largest_first(by_worker),
        "slices": _largest_first([one.slices for one in handovers]),
    }


def _largest_first(each: Sequence[Mapping[tuple[str, str], float]]) -> dict[str, Any]:
    names = {name for one in each for name in one}
    all_of = {": ".join(name): _ms([one.get(name, 0.0) for one in each]) for name in names}
    return dict(sorted(all_of.items(), key=lambda item: (-item[1]["sum"], item[0])))


def _ms(values: Sequence[float]) -> dict[str, float]:
    found = distribution(value / 1e3 for value in values)
    assert found is not None
    kept = {what: found[what] for what in ("p50", "p99", "max")}
    return {**kept, "sum": sum(values) / 1e3, "share_with_any": sum(value > 0 for value in values) / len(values)}


def _table(title: str, rows: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table("ms", title=title)
    for column in ("p50", "p99", "max", "sum", "had any"):
        table.add_column(column, justify="right")
    for name, values in rows.items():
        figures = (f"{values[what]:,.3f}" for what in ("p50", "p99", "max", "sum"))
        table.add_row(name, *figures, f"{values['share_with_any']:.0%}")
    return table


def _longest_table(longest: Sequence[Waits]) -> Table:
    table = Table("request", "at, s", "ms", "of which", title=f"the {len(longest)} longest handovers")
    for waits in longest:
        parts = sorted(waits.slices.items(), key=lambda item: -item[1])
        said = [f"{took / 1e3:.2f} {stage}: {name}" for (stage, name), took in parts if took >= 0.01 * waits.total]
        table.add_row(waits.request_id, f"{waits.start / 1e6:.3f}", f"{waits.total / 1e3:.2f}", "\n".join(said))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if there are whole handovers in the recording, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Any = parser.add_argument
    add("file", type=Path, help="of `tandem trace`, or NAME.trace.json.gz of benchmarks.interference")
    add("--longest", type=int, default=10, metavar="N", help="handovers that are told one by one (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="all figures, and each handover's own, go there")
    arguments = parser.parse_args(argv)
    try:
        trace = read_trace(arguments.file)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for warning in trace.get("otherData", {}).get("warnings", ()):
        print(f"{arguments.file}: {warning}", file=sys.stderr)
    handovers, num_partial = waits_of(trace)
    print(f"{len(handovers)} handovers; {num_partial} more are not wholly in the recording")
    if not handovers:
        return 1
    figures = summarize(handovers)
    longest = sorted(handovers, key=lambda waits: -waits.total)[: arguments.longest]
    console = Console()
    console.print(_table("handovers and their stages", {"handover": figures["total"], **figures["stages"]}))
    console.print(_table("what each worker's thread did meanwhile", figures["threads"]))
    console.print(_table("the same by stage", figures["slices"]))
    console.print(_longest_table(longest))
    if arguments.json:
        each = [
            {
                "request": waits.request_id,
                "start_ms": waits.start / 1e3,
                "ms": waits.total / 1e3,
                "stages_ms": {stage: took / 1e3 for stage, took in waits.stages.items()},
                "slices_ms": {": ".join(name): took / 1e3 for name, took in waits.slices.items()},
            }
            for waits in handovers
        ]
        arguments.json.write_text(json.dumps({**figures, "num_partial": num_partial, "handovers": each}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
