"""Checks that trace viewers can open a trace."""

from collections import defaultdict
from typing import Any

Event = dict[str, Any]
# 1.5 ns in microseconds: times are sums of decimal fractions.
ROUNDING_US = 0.0015
LINKED = {"prefill_queue", "prefill", "copy", "commit", "decode"}


def check_trace(trace: dict[str, Any]) -> None:
    """Assert that every event has the fields of its kind, slices nest per track, and arrows touch slices.

    Each arrow must begin and end, and touch a slice at every point.
    """
    events = trace["traceEvents"]
    slices: dict[tuple[int, int], list[Event]] = defaultdict(list)
    arrows: dict[int, list[Event]] = defaultdict(list)
    named = set()
    for event in events:
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0
        match event["ph"]:
            case "X":
                assert isinstance(event["dur"], (int, float)) and event["dur"] >= 0
                slices[event["pid"], event["tid"]].append(event)
            case "s" | "t" | "f":
                arrows[event["id"]].append(event)
            case "M":
                named.add((event["name"], event["pid"], event["tid"]))
            case other:
                raise AssertionError(f"a kind of event that nobody makes: {other}")
    for track, its_slices in slices.items():
        assert ("process_name", track[0], 0) in named
        assert ("thread_name", *track) in named
        check_nesting(its_slices)
    for its_arrows in arrows.values():
        assert [event["ph"] for event in its_arrows] == ["s", *["t"] * (len(its_arrows) - 2), "f"]
        assert [event["ts"] for event in its_arrows] == sorted(event["ts"] for event in its_arrows)
        for event in its_arrows:
            # An arrow belongs to the innermost open slice.
            under_way = [s for s in slices[event["pid"], event["tid"]] if s["ts"] <= event["ts"] < end_of(s)]
            assert under_way, event
            touched = min(under_way, key=lambda s: s["dur"])
            assert touched["name"] in LINKED, (event, touched)


def check_nesting(slices: list[Event]) -> None:
    outer: list[Event] = []
    for event in sorted(slices, key=lambda s: (s["ts"], -s["dur"])):
        while outer and end_of(outer[-1]) <= event["ts"] + ROUNDING_US:
            outer.pop()
        assert not outer or end_of(event) <= end_of(outer[-1]) + ROUNDING_US, (outer[-1], event)
        outer.append(event)


def end_of(event: Event) -> float:
    end: float = event["ts"] + event["dur"]
    return end
