"""Steps, gaps and kernels read from a profiler's trace."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels import device_trace, steps
from tandem.engine.base import ForwardOutput


def event(name: str, start: float, end: float, launch: int, category: str = "kernel") -> dict[str, Any]:
    args = {"correlation": launch, "stream": 7}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "args": args}


def read(tmp_path: Path, raw: list[dict[str, Any]]) -> list[device_trace.DeviceEvent]:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": raw}).encode()))
    return device_trace.read_trace(path)


def graph(start: float, launch: int) -> list[dict[str, Any]]:
    """A step of ten kernels of 1 µs, side by side."""
    names = ["embed", *["gemm"] * 8, "argmax"]
    return [event(name, start + i, start + i + 1, launch) for i, name in enumerate(names)]


def test_steps_with_graphs(tmp_path: Path) -> None:
    """Steps of 10 µs: after 5 µs with a copy of 2 µs and a lone kernel of 1 µs, the second; after 3 µs, the third."""
    between = [event("Memcpy HtoD", 11, 13, 50, "gpu_memcpy"), event("gather", 12.5, 13.5, 51)]
    host = [{"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 3, "args": {}}]
    events = read(tmp_path, [*graph(15, 2), *host, *between, *graph(0, 1), *graph(28, 3), {"ph": "M"}])
    found = device_trace.find_steps(events)
    assert found == [(0, 10), (15, 25), (28, 38)]
    gaps = device_trace.gaps_between(found)
    assert gaps == [(10, 15), (25, 28)]
    assert device_trace.idle_times(events, gaps) == [2.5, 3]
    uses = {use.name: (use.num_calls, use.time) for use in device_trace.kernel_uses(events, found)}
    assert uses == {"gemm": (8, 8), "embed": (1, 1), "argmax": (1, 1), "Memcpy HtoD": (0.5, 1), "gather": (0.5, 0.5)}


def test_steps_without_graphs_end_with_the_most_likely_tokens(tmp_path: Path) -> None:
    names = ["gemm", "ArgMaxOps<float>", "embed", "gemm", "ArgMaxOps<float>", "embed", "ArgMaxOps<float>", "embed"]
    events = read(tmp_path, [event(name, 10 * i, 10 * i + 4, i) for i, name in enumerate(names)])
    assert device_trace.find_steps(events) == [(20, 44), (50, 64)]


def test_a_trace_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither graphs nor a kernel called argmax"):
        device_trace.find_steps(read(tmp_path, [event("gemm", 0, 1, 1)]))


def test_implementations_run_within_named_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    class Output(ForwardOutput):
        def done(self) -> bool:
            return True

        def token_ids(self) -> list[int]:
            return [1]

        def logprobs(self) -> list[Any]:
            return [None]

        def prompt_logprobs(self) -> list[Any]:
            return [None]

        def embeddings(self) -> list[Any]:
            return [None]

    entered: list[str] = []

    class Range:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *_: object) -> None:
            entered.append(f"end of {self.name}")

    # Leave the product's classes unchanged.
    monkeypatch.setattr(steps, "_subclasses", lambda cls: [Output] if cls is ForwardOutput else [])
    steps.annotate(Range)
    assert Output().token_ids() == [1]
    assert entered == ["collect", "end of collect"]
