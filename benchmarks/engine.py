"""Measures one engine through the whole engine loop, without sockets, on one GPU or with a rank on each of several.

Weights and prompts are random; prompts share no prefix. Floors (engine/floors.py) come from rates of the same run;
those of several ranks assume as many times one GPU's rates.

decode    a decode step: (time for 257 output tokens - time for 1) / 256, all requests at once, prompts of 1,024 tokens
prefill   prompt tokens per second until every request has its first token
workload  50 prompts of 1 to 512 tokens with 1 to 128 output tokens, all at once: tokens per second
startup   from the start of the process until the engine can serve, and the first request
sweep     decode steps over batch sizes and times to first token over prompt lengths
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.engine_limits import measure_limits
from benchmarks.engine_loop import PAGE_SIZE, Loop, add_engine_arguments, build_loop, open_model
from benchmarks.engine_ranks import RankedEngines
from tandem.engine.floors import Limits, decode_floor, prefill_floor
from tandem.engine.models.config import ModelConfig
from tandem.engine.stage_timer import StageTimer

PARTS = ("decode", "prefill", "workload", "startup", "sweep")
NUM_RUNS = 3


@dataclass(frozen=True, slots=True)
class Sizes:
    """Attributes: prefills: (requests, tokens of each); workload_prompt, workload_output: maximum lengths."""

    batches: Sequence[int] = (1, 8, 32, 128, 256)
    prompt_len: int = 1024
    num_steps: int = 256
    prefills: Sequence[tuple[int, int]] = ((1, 8192), (8, 8192), (32, 2048), (64, 512), (1, 512))
    workload_requests: int = 50
    workload_prompt: int = 512
    workload_output: int = 128
    sweep_batches: Sequence[int] = tuple(2**i for i in range(9))
    sweep_prompts: Sequence[int] = tuple(2**i for i in range(7, 16))

    def of_parts(self, parts: Sequence[str]) -> "Sizes":
        """Returns the sizes without those of other parts, which a pool need not hold."""
        sizes = self if "sweep" in parts else replace(self, sweep_batches=(1,), sweep_prompts=(1,))
        sizes = sizes if "prefill" in parts else replace(sizes, prefills=((1, 1),))
        return sizes if "workload" in parts else replace(sizes, workload_requests=1)

    @property
    def max_batch_size(self) -> int:
        return max(*self.batches, *self.sweep_batches, self.workload_requests)

    @property
    def num_tokens(self) -> int:
        # Round each request up to a page.
        decode = self.max_batch_size * (self.prompt_len + self.num_steps + PAGE_SIZE)
        prefill = max(count * (prompt_len + PAGE_SIZE) for count, prompt_len in self.prefills)
        workload = self.workload_requests * (self.workload_prompt + self.workload_output + PAGE_SIZE)
        return max(decode, prefill, workload, max(self.sweep_prompts) + PAGE_SIZE)


@dataclass(frozen=True, slots=True)
class Result:
    """Attributes: floor: best possible value, in the same unit, or None."""

    name: str
    value: float
    unit: str
    floor: float | None = None

    @property
    def ratio(self) -> float | None:
        if self.floor is None:
            return None
        return self.floor / self.value if self.unit == "tok/s" else self.value / self.floor


class EngineBenchmark:
    def __init__(
        self, loop: Loop, model: ModelConfig, limits: Limits, sizes: Sizes, kv_cache_dtype: str = "auto"
    ) -> None:
        self._loop = loop
        self._model = model
        self._limits = limits
        self._kv_cache_dtype = kv_cache_dtype
        self._sizes = sizes

    def at(self, **sizes: Any) -> "EngineBenchmark":
        sizes_then = replace(self._sizes, **sizes)
        return EngineBenchmark(self._loop, self._model, self._limits, sizes_then, self._kv_cache_dtype)

    def decode(self) -> Iterator[Result]:
        return self._decode_steps(self._sizes.batches)

    def prefill(self) -> Iterator[Result]:
        for num_requests, prompt_len in self._sizes.prefills:
            seconds = self._first_token_s(num_requests, prompt_len)
            floor_s = prefill_floor(self._model, self._limits, num_requests, prompt_len)
            num_tokens = num_requests * prompt_len
            yield Result(f"prefill, {num_requests} x {prompt_len}", num_tokens / seconds, "tok/s", num_tokens / floor_s)

    def workload(self) -> Iterator[Result]:
        sizes, rng = self._sizes, random.Random(0)
        requests = [
            (rng.randint(1, sizes.workload_prompt), rng.randint(1, sizes.workload_output))
            for _ in range(sizes.workload_requests)
        ]
        self._loop.run(requests)
        times = [self._loop.run(requests) for _ in range(NUM_RUNS)]
        num_output = sum(output_len for _, output_len in requests)
        num_tokens = sum(prompt_len for prompt_len, _ in requests) + num_output
        for which, seconds in (("best", min(times)), ("median", statistics.median(times))):
            yield Result(f"workload, prompt and output tokens, {which}", num_tokens / seconds, "tok/s")
            yield Result(f"workload, output tokens, {which}", num_output / seconds, "tok/s")

    def sweep(self) -> Iterator[Result]:
        yield from self._decode_steps(self._sizes.sweep_batches)
        for prompt_len in self._sizes.sweep_prompts:
            if prompt_len <= self._model.max_position_embeddings:
                seconds = self._first_token_s(1, prompt_len)
                floor_s = prefill_floor(self._model, self._limits, 1, prompt_len)
                yield Result(f"first token, 1 x {prompt_len}", seconds * 1e3, "ms", floor_s * 1e3)

    def _decode_steps(self, batch_sizes: Sequence[int]) -> Iterator[Result]:
        prompt_len, num_steps = self._sizes.prompt_len, self._sizes.num_steps
        for size in batch_sizes:
            self._loop.run([(prompt_len, 2)] * size)
            once_s = self._loop.run([(prompt_len, 1)] * size)
            many_s = self._loop.run([(prompt_len, num_steps + 1)] * size)
            floor_s = decode_floor(self._model, self._limits, size, prompt_len + num_steps // 2, self._kv_cache_dtype)
            yield Result(f"decode step, batch {size}", (many_s - once_s) / num_steps * 1e3, "ms", floor_s * 1e3)

    def _first_token_s(self, num_requests: int, prompt_len: int) -> float:
        times = [self._loop.run([(prompt_len, 1)] * num_requests) for _ in range(NUM_RUNS + 1)]
        return statistics.median(times[1:])


def start_up_results(stages: StageTimer, first_request_s: float) -> Iterator[Result]:
    for name, seconds in stages.seconds.items():
        yield Result(f"start-up, {name}", seconds, "s")
    yield Result("start-up, ready", sum(stages.seconds.values()), "s")
    yield Result("first request, 512 in and 8 out", first_request_s, "s")


def show(results: Sequence[Result], limits: Limits, title: str) -> None:
    table = Table("what", title=title)
    for column in ("measured", "floor", "times the floor"):
        table.add_column(column, justify="right")
    for result in results:
        floor = "" if result.floor is None else _with_unit(result.floor, result.unit)
        ratio = "" if result.ratio is None else f"{result.ratio:.2f}"
        table.add_row(result.name, _with_unit(result.value, result.unit), floor, ratio)
    console = Console(width=110)
    console.print(table)
    console.print(f"copy {limits.copy_bandwidth / 1e12:.2f} TB/s, matmul {limits.matmul_rate / 1e12:.0f} TFLOP/s")


def _with_unit(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if unit == "tok/s" else f"{value:,.2f} {unit}"


def main(argv: Sequence[str] | None = None) -> int:
    stages = StageTimer()
    stages.seconds["imports"] = time.time() - psutil.Process().create_time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser)
    parser.add_argument(
        "--only", metavar="PARTS", help=f"parts to measure, of {','.join(PARTS)} (default: all but sweep)"
    )
    parser.add_argument("--sweep", action="store_true", help="measure the sweep too")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=Sizes().batches, help="of decode steps")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks, on a GPU each if there are so many")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    arguments = parser.parse_args(argv)
    parts = arguments.only.split(",") if arguments.only else [part for part in PARTS if part != "sweep"]
    parts += ["sweep"] if arguments.sweep else []
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}: choose from {', '.join(PARTS)}")

    sizes = Sizes(batches=arguments.batch_sizes).of_parts(parts)
    stages.begin("device and model")
    model = open_model(parser, Path(arguments.model), arguments.quantization)
    with RankedEngines() as engines:
        loop = build_loop(
            arguments, sizes.num_tokens, sizes.max_batch_size, stages.begin, engines.build, degree=arguments.tp
        )
        stages.end()
        first_request_s = loop.run([(512, 8)])
        # After the start-up, because measuring the limits sets up the device.
        limits = Limits(*(arguments.tp * rate for rate in measure_limits()))
        benchmark = EngineBenchmark(loop, model, limits, sizes, arguments.kv_cache_dtype)
        loop.run([(sizes.prompt_len, 8)] * 2)
        measure = {
            "decode": benchmark.decode,
            "prefill": benchmark.prefill,
            "workload": benchmark.workload,
            "startup": lambda: start_up_results(stages, first_request_s),
            "sweep": benchmark.sweep,
        }
        results = [result for part in parts for result in measure[part]()]
    overlap = "off" if arguments.disable_overlap else "on"
    weights = "FP8 weights" if model.quantization else "bfloat16"
    kv = "" if arguments.kv_cache_dtype == "auto" else f", KV {arguments.kv_cache_dtype}"
    kv += "" if arguments.tp == 1 else f", {arguments.tp} ranks"
    title = f"{Path(arguments.model).name}, {weights}{kv}, attention {arguments.attention_backend}, overlap {overlap}"
    show(results, limits, title)
    if model.experts is not None:
        print(
            "floors assume that tokens choose experts evenly; benchmarks.expert_skew measures by how much they do not"
        )
    if arguments.json:
        figures = {
            "title": title,
            "limits": limits._asdict(),
            "results": [asdict(result) | {"ratio": result.ratio} for result in results],
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
