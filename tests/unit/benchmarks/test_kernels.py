"""Steps, gaps and kernels read from a profiler's trace, and the floors beside them."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.kernels import __main__ as kernels
from benchmarks.kernels import device_trace, mixture, stages, steps
from tandem.engine.base import ForwardOutput
from tandem.engine.floors import Limits, decode_floor, decode_flops, kv_bytes_per_token, read_weight_bytes
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.ops import TorchOps
from tandem.engine.models.config import ModelConfig
from tests.fakes.model_config import TINY_EXPERTS, TINY_LLAMA
from tests.fakes.model_shapes import DEEPSEEK_V2_LITE, LLAMA_8B, QWEN3_30B_A3B


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


# --- floors ---


@pytest.fixture(params=["Qwen2MoeForCausalLM", "Dots1ForCausalLM", "LlamaForCausalLM"])
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> ModelConfig:
    """Shared experts with and without a gate, a first dense layer, and no experts."""
    config = TINY_LLAMA | {"num_hidden_layers": 3, "first_k_dense_replace": 1, "n_shared_experts": 1}
    if request.param != "LlamaForCausalLM":
        config |= TINY_EXPERTS
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [request.param]}))
    return ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_a_step_s_stages_add_up_to_its_floor(tiny: ModelConfig, quantization: str) -> None:
    limits = Limits(1e9, 1e30)
    for model in (tiny.quantized(quantization), LLAMA_8B, QWEN3_30B_A3B.quantized(quantization)):
        found = list(stages.step_stages(model, 3, 10, "auto"))
        # Without gates of shared experts, which nothing would show.
        kv = 3 * 10 * kv_bytes_per_token(model)
        assert sum(s.num_bytes for s in found) == pytest.approx(read_weight_bytes(model, 3) + kv, rel=0.01)
        assert sum(s.floor(limits) for s in found) == pytest.approx(decode_floor(model, limits, 3, 10) * 1e6, rel=0.01)
        if not model.quantization:
            assert sum(s.flops for s in found) == pytest.approx(decode_flops(model, 3), rel=0.01)


def test_floors_are_shown_by_stage(capsys: pytest.CaptureFixture[str]) -> None:
    found = list(stages.step_stages(QWEN3_30B_A3B, 1, 1024, "auto"))
    steps.show_floors(found, Limits(4.15e12, 780e12), Console(width=100))
    rows = [row.split("│") for row in capsys.readouterr().out.splitlines() if "│" in row]
    shown = {row[1].strip(): row[-2].strip() for row in rows}
    # 8 experts of 9.4 MB in 48 layers, two thirds of them gate and up.
    assert float(shown["experts' gate and up"]) == pytest.approx(48 * 8 * 9.437 / 4.15 * 2 / 3, rel=0.001)
    assert "dense MLP" not in shown
    assert stages.has_dense_layers(LLAMA_8B) and not stages.has_dense_layers(QWEN3_30B_A3B)


def test_a_mixture_is_shown_with_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TINY_LLAMA | TINY_EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelConfig.from_dir(tmp_path)
    num_run: list[int] = []

    def time(run: Callable[[], object], num_layers: int) -> float:
        num_run.append(num_layers)
        run()
        return 50.0

    def profile(activities: Sequence[object], path: Path, run: Callable[[], object]) -> None:
        run()
        kernels = [event("void gate_up<2>", 0, 60, 1), event("router", 60, 90, 2), event("router", 90, 120, 3)]
        path.write_text(json.dumps({"traceEvents": kernels}))

    monkeypatch.setattr(mixture, "profile", profile)
    kernels = mixture.MixtureKernels(model, Limits(1e6, 1e30), TorchOps(), torch.device("cpu"), time)
    hidden, norm = torch.randn(5, 16).bfloat16(), Norm(torch.ones(16).bfloat16(), 1e-5)
    whole, *parts = kernels.rows(hidden, norm)
    # All layers are too small to exceed a cache.
    assert num_run == [3] and whole.time == 50.0 and not whole.is_part
    floors = {row.name.strip(): row.floor for row in parts if row.floor is not None}
    assert whole.floor == sum(floor for floor in floors.values())
    # Two thirds of an expert, 3 x 16 x 16 numbers; of 4 all but 1 / 32 are chosen.
    assert floors["experts' gate and up"] == pytest.approx(2 * 2 * 16 * 16 * 4 * (1 - 1 / 32))
    assert all(row.is_part for row in parts)
    times = {row.name.strip(): row.time for row in parts if row.time is not None}
    assert times == {"kernel gate_up<2>": 20.0, "kernel router": 20.0}


@pytest.mark.parametrize("part", ["decode", "prefill", "products"])
def test_parts_of_attention_by_head_refuse_latents(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "open_model", lambda *_: DEEPSEEK_V2_LITE)
    with pytest.raises(SystemExit) as ended:
        kernels.main([part, "--model", "directory"])
    assert ended.value.code == 2
    assert "directory has latent attention" in capsys.readouterr().err
