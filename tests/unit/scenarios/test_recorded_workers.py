"""Recorder slices of overlapping prefill and decode workers, and of requests that end early."""

from collections import defaultdict
from typing import Any

from tandem.deploy.cli.trace_events import Trace
from tandem.prefill_worker.config import PrefillConfig
from tandem.recording import DEVICE, HANDOVERS, Slice, copies_to
from tandem.rpc.recording_service import encode_slice
from tandem.v1 import recording_pb2 as pb
from tests.fakes.engine import expected_tokens
from tests.fakes.trace_file import check_trace
from tests.fakes.workers import WorkerPair

PROMPTS = {"a": list(range(30)), "b": list(range(100, 117)), "c": list(range(200, 203))}


def overlapping_pair() -> WorkerPair:
    config = PrefillConfig(chunk_size=8, min_shared_tokens=4)
    pair = WorkerPair(prefill={"config": config, "asynchronous": True}, asynchronous=True, step_s=0.25)
    for side in (pair.p, pair.d):
        side.recorder.start()
    return pair


def stop(pair: WorkerPair) -> dict[str, tuple[Slice, ...]]:
    return {name: tuple(side.recorder.stop().take(10_000)) for name, side in (("p", pair.p), ("d", pair.d))}


def named(slices: tuple[Slice, ...], track: str, name: str) -> list[Slice]:
    return [kept for kept in slices if (kept.track, kept.name) == (track, name)]


def test_each_forward_copy_and_handover_is_there_once() -> None:
    pair = overlapping_pair()
    for name, prompt in PROMPTS.items():
        pair.submit(name, prompt)
    while not all(len(pair.output(name)) == 5 for name in PROMPTS):
        pair.run()
        # The next step is composed shortly before the running one ends.
        pair.clock.advance(1.0)
    pair.run()
    for name, prompt in PROMPTS.items():
        assert pair.output(name) == expected_tokens(prompt, 5)
    slices = stop(pair)

    forwards = named(slices["p"], DEVICE, "prefill")
    assert [("prefill", list(kept.request_tokens)) for kept in forwards] == pair.p.engine.batches
    assert [kept.numbers["num_tokens"] for kept in forwards] == [sum(kept.request_tokens) for kept in forwards]
    assert {kept.numbers["device_us"] for kept in named(slices["d"], DEVICE, "decode")} == {250_000}
    steps = named(slices["d"], DEVICE, "decode")
    assert [kept.numbers["batch_size"] for kept in steps] == [len(tokens) for _, tokens in pair.d.engine.batches]
    # A request is named only in its first step.
    assert sorted(name for kept in steps for name in kept.request_ids) == list(PROMPTS)

    copied: dict[str, int] = defaultdict(int)
    for kept in named(slices["p"], copies_to("d"), "copy"):
        copied[kept.request_ids[0]] += kept.numbers["num_pages"]
        assert kept.numbers["num_bytes"] == kept.numbers["num_pages"] * pair.p.engine.pool.layout.page_bytes
    assert copied == {name: -(-len(prompt) // 4) for name, prompt in PROMPTS.items()}
    for side, name in (("p", "lease"), ("p", "handover"), ("d", "lease wait"), ("d", "commit"), ("d", "wait for step")):
        assert sorted(kept.request_ids[0] for kept in named(slices[side], HANDOVERS, name)) == list(PROMPTS), name
    assert all(kept.end_ns >= kept.start_ns and not kept.detail for side in slices.values() for kept in side)

    trace = Trace()
    for process, role in (("p", "prefill"), ("d", "decode")):
        trace.add(pb.RecordedPart(process=process, role=role, slices=map(encode_slice, slices[process])))
    made: dict[str, Any] = trace.as_json()
    check_trace(made)
    assert [event["ph"] for event in made["traceEvents"]].count("f") == len(PROMPTS)


def test_early_ends_are_recorded_and_leave_no_open_slices() -> None:
    pair = overlapping_pair()
    for name, prompt in PROMPTS.items():
        pair.submit(name, prompt)
    for _ in range(4):
        pair.turn()
    pair.cut_link()
    pair.run()
    slices = stop(pair)
    ended = {kept.request_ids[0]: kept.detail for kept in named(slices["p"], HANDOVERS, "handover")}
    assert set(ended.values()) <= {"", "the link to the decode worker was lost"} and "" not in ended.values()
    assert [kept.detail for side in slices.values() for kept in side if kept.detail == "still under way"] == []
