"""The engine benchmark and its analysis of traces, on a CPU."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import engine, fp8
from benchmarks.engine import EngineBenchmark, Result, Sizes, start_up_results
from benchmarks.engine_loop import Loop
from benchmarks.kernels import __main__ as kernels
from tandem.decode_worker.config import DecodeConfig
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.floors import Limits
from tandem.engine.models.config import ModelConfig
from tandem.engine.stage_timer import StageTimer
from tandem.prefill_worker.config import PrefillConfig
from tests.cluster.conftest import VOCAB_SIZE, save_tiny_model

SIZES = Sizes(
    batches=(1, 2),
    prompt_len=20,
    num_steps=4,
    prefills=((1, 40), (2, 20)),
    workload_requests=4,
    workload_prompt=30,
    workload_output=6,
    sweep_batches=(1, 2),
    sweep_prompts=(16, 32, 1024),
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(directory)
    return directory


@pytest.fixture
def loop(model_dir: Path) -> Iterator[Loop]:
    engine_config = EngineConfig(str(model_dir), load_format="dummy", num_pages=SIZES.num_tokens // 16)
    engine = build_engine(engine_config, "engine-benchmark", lambda doing: None)
    yield Loop(engine, PrefillConfig(), DecodeConfig(), VOCAB_SIZE)
    engine.pool.close()


def test_every_part_measures_its_names(loop: Loop, model_dir: Path) -> None:
    benchmark = EngineBenchmark(loop, ModelConfig.from_dir(model_dir), Limits(1e10, 1e11), SIZES)
    results = [*benchmark.decode(), *benchmark.prefill(), *benchmark.workload(), *benchmark.sweep()]
    # The sweep omits prompts that are too long for the model.
    assert [result.name for result in results] == [
        "decode step, batch 1",
        "decode step, batch 2",
        "prefill, 1 x 40",
        "prefill, 2 x 20",
        "workload, prompt and output tokens, best",
        "workload, output tokens, best",
        "workload, prompt and output tokens, median",
        "workload, output tokens, median",
        "decode step, batch 1",
        "decode step, batch 2",
        "first token, 1 x 16",
        "first token, 1 x 32",
    ]
    # A step's time is a difference, negative at times on a busy machine.
    assert all(result.value > 0 for result in results if "decode" not in result.name)
    assert all(result.ratio is not None for result in results if "workload" not in result.name)


def test_the_pool_holds_only_the_parts_that_run() -> None:
    """A large model leaves little room beside its weights."""
    assert Sizes().of_parts(engine.PARTS) == Sizes()
    few = Sizes(batches=(1, 8)).of_parts(["decode"])
    assert few.max_batch_size == 8 and few.num_tokens == 8 * (1024 + 256 + 16)
    prompts = Sizes(batches=(1,)).of_parts(["decode", "prefill"])
    assert (prompts.max_batch_size, prompts.num_tokens) == (1, 32 * (2048 + 16))
    assert Sizes(batches=(1,)).of_parts(["workload"]).max_batch_size == Sizes().workload_requests


def test_fp8_and_bfloat16_are_measured_in_turns(
    loop: Loop, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ModelConfig.from_dir(model_dir)
    benchmarks = {
        kind: EngineBenchmark(loop, model.quantized(weights), Limits(1e10, 1e11), SIZES, pages)
        for kind, (weights, pages) in fp8.KINDS.items()
    }
    rows = list(fp8.compare(benchmarks, SIZES, num_turns=1))
    assert [row.name for row in rows] == [
        "decode step, batch 1",
        "decode step, batch 2",
        "prefill, 1 x 40",
        "prefill, 2 x 20",
    ]
    for row in rows:
        floors = [row.by_kind[kind].floor for kind in fp8.KINDS]
        # Only decode steps count pages.
        assert None not in floors and len({*floors}) == (3 if "decode" in row.name else 2)
    times = {kind: Result("x", value, "ms", 1.0) for kind, value in zip(fp8.KINDS, (4.0, 2.0, 1.6), strict=True)}
    faster = fp8.Compared("x", times)
    assert [faster.speedup(kind) for kind in fp8.KINDS] == [1.0, 2.0, 2.5]
    fp8.show([faster], "title", Console(width=200))
    assert "2.50" in capsys.readouterr().out


def test_a_loop_can_be_held_in_the_middle_of_steady_steps(loop: Loop) -> None:
    loop.start(3, 20, 12)
    assert (loop.counts.num_first, loop.counts.num_ended) == (3, 0)
    num_before = loop.counts.num_decode_steps
    loop.decode(4)
    assert loop.counts.num_decode_steps == num_before + 4
    assert loop.counts.num_ended == 0
    loop.finish()
    assert loop.counts.num_ended == 3


def test_ratio_is_relative_to_the_floor() -> None:
    assert Result("step", 3.0, "ms", 2.0).ratio == 1.5
    assert Result("prefill", 200.0, "tok/s", 300.0).ratio == 1.5
    assert Result("start", 3.0, "s").ratio is None


def test_start_up_is_split_into_its_phases() -> None:
    stages = StageTimer()
    for doing in ("loading weights", "capturing graphs (1 of 2)", "capturing graphs (2 of 2)"):
        stages.begin(doing)
    stages.end()
    results = {result.name: result.value for result in start_up_results(stages, 0.5)}
    assert list(results) == [
        "start-up, loading weights",
        "start-up, capturing graphs",
        "start-up, ready",
        "first request, 512 in and 8 out",
    ]
    assert results["start-up, ready"] == pytest.approx(sum(stages.seconds.values()))


@pytest.mark.parametrize(
    ("main", "part"),
    [
        (engine.main, []),
        (fp8.main, []),
        *((kernels.main, [part]) for part in ("decode", "prefill", "products", "experts", "step")),
    ],
)
def test_unmeasurable_parts_take_one_line(
    main: Callable[[Sequence[str]], int],
    part: list[str],
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    no_model = model_dir.parent / "absent"
    empty = model_dir.parent
    for directory, message in (
        (model_dir, "; run this on a machine with a GPU"),
        (no_model, f"--model {no_model} is no directory; it must be one with a model's config.json"),
        (empty, f"{empty / 'config.json'}: "),
    ):
        with pytest.raises(SystemExit) as stop:
            main([*part, "--model", str(directory)])
        error = capsys.readouterr().err
        assert stop.value.code == 2
        assert message in error and error.count("\n") == 1
