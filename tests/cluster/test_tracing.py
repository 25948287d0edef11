"""`tandem trace` on a serving cluster."""

import json
import random
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem.deploy.cli.main import main
from tests.cluster.conftest import ServedCluster, random_ids
from tests.fakes.trace_file import check_trace, end_of

NUM_REQUESTS = 20


def test_trace_shows_every_request(tiny_pd: ServedCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(5)
    prompts = [random_ids(rng, rng.randrange(20, 150)) for _ in range(NUM_REQUESTS)]
    out = tmp_path / "trace.json"
    status: list[int] = []

    def record() -> None:
        address = tiny_pd.client.address
        status.append(main(["trace", "--seconds", "2.5", "--out", str(out), "--address", address]))

    recorder = threading.Thread(target=record)
    recorder.start()
    # Earlier requests would be incomplete.
    time.sleep(0.4)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda prompt: tiny_pd.complete(prompt, max_tokens=6, ignore_eos=True), prompts))
    recorder.join()
    assert status == [0], capsys.readouterr().err

    trace = json.loads(out.read_text())
    check_trace(trace)
    assert trace["otherData"]["warnings"] == []
    tracks: dict[tuple[str, str], list[dict]] = defaultdict(list)
    processes = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    for event in slices:
        tracks[processes[event["pid"]], threads[event["pid"], event["tid"]]].append(event)
    assert list(processes.values()) == ["router-0", "prefill-0 (prefill)", "decode-0 (decode)"]

    # Phases add up to the request's time.
    requests = [e for e in tracks["router-0", "requests"] if e["name"] == "request"]
    assert len(requests) == NUM_REQUESTS
    for request in requests:
        inside = [
            e
            for e in slices
            if (e["pid"], e["tid"]) == (request["pid"], request["tid"])
            and e is not request
            and request["ts"] <= e["ts"] < end_of(request)
        ]
        assert {"prefill_queue", "prefill", "handover", "decode"} <= {e["name"] for e in inside}
        assert abs(sum(e["dur"] for e in inside) - request["dur"]) < 1000
        assert request["args"]["detail"].startswith("length prefill-0 decode-0")

    # All prompt tokens are in forward passes, and their pages in copies.
    forwards = tracks["prefill-0 (prefill)", "device"]
    computed: dict[str, int] = defaultdict(int)
    for forward in forwards:
        assert forward["args"]["num_tokens"] == sum(forward["args"]["requests"].values())
        for request_id, num_tokens in forward["args"]["requests"].items():
            computed[request_id] += num_tokens
    assert sorted(computed.values()) == sorted(len(prompt) for prompt in prompts)
    copies = tracks["prefill-0 (prefill)", "copies to decode-0"]
    assert sum(copy["args"]["num_pages"] for copy in copies) == sum(r["args"]["pages_shipped"] for r in requests)
    steps = tracks["decode-0 (decode)", "device"]
    assert sum(step["args"]["batch_size"] for step in steps) == 5 * NUM_REQUESTS

    for worker in ("prefill-0 (prefill)", "decode-0 (decode)"):
        names = {e["name"] for e in tracks[worker, "engine thread"]}
        assert {"step", "receive", "settle", "launch", "collect", "sleep"} <= names

    # Arrows: router, prefill, copy, commit, first decode step.
    arrows: dict[int, list[str]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            arrows[event["id"]].append(f"{processes[event['pid']]}: {threads[event['pid'], event['tid']]}")
    assert len(arrows) == NUM_REQUESTS
    for places in arrows.values():
        assert places[0] == "router-0: requests"
        assert places[1] == "prefill-0 (prefill): device"
        assert "prefill-0 (prefill): copies to decode-0" in places
        assert places[-2:] == ["decode-0 (decode): handovers", "decode-0 (decode): device"]
