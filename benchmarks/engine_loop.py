"""One engine behind real schedulers, without sockets."""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from tandem import exit_codes
from tandem.both_worker.local_worker import Counts, LocalWorker
from tandem.decode_worker.config import DecodeConfig
from tandem.engine.attention.table import ATTENTION_BACKENDS, AUTO
from tandem.engine.base import EngineBase
from tandem.engine.build import build_engine, why_no_gpu
from tandem.engine.config import KV_CACHE_DTYPES, QUANTIZATIONS, EngineConfig
from tandem.engine.models.config import ModelConfig
from tandem.garbage import collect_seldom, freeze_objects
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams

INCARNATION = "benchmark"
CHUNK_SIZE = 16384
PAGE_SIZE = 16
RUN_TIMEOUT_S = 300.0

BuildEngine: TypeAlias = Callable[[EngineConfig, Callable[[str], None]], EngineBase]


class Loop:
    """Serves requests of random tokens without common prefixes."""

    def __init__(self, engine: EngineBase, prefill: PrefillConfig, decode: DecodeConfig, vocab_size: int) -> None:
        self.counts = Counts()
        self._worker = LocalWorker(engine, prefill, decode, self.counts.count)
        self._vocab_size = vocab_size
        self._rng = random.Random(0)
        self._num_requests = 0

    def run(self, requests: Sequence[tuple[int, int]], grammars: Sequence[str] = ()) -> float:
        """Serve requests of (prompt, output) lengths, all at once; return the seconds until the last ends."""
        prompts = [self._rng.choices(range(self._vocab_size), k=prompt_len) for prompt_len, _ in requests]
        started = time.perf_counter()
        of_each = [*grammars, *[""] * (len(requests) - len(grammars))]
        for prompt, (_, max_tokens), grammar in zip(prompts, requests, of_each, strict=True):
            self._submit(prompt, max_tokens, grammar)
        self.finish()
        return time.perf_counter() - started

    def start(self, num_requests: int, prompt_len: int, max_tokens: int) -> None:
        for _ in range(num_requests):
            self._submit(self._rng.choices(range(self._vocab_size), k=prompt_len), max_tokens)
        self._worker.run_until(lambda: self.counts.num_first == self._num_requests, RUN_TIMEOUT_S)

    def decode(self, num_steps: int) -> None:
        target = self.counts.num_decode_steps + num_steps
        self._worker.run_until(lambda: self.counts.num_decode_steps >= target, RUN_TIMEOUT_S)

    def finish(self) -> None:
        self._worker.run_until(lambda: self.counts.num_ended == self._num_requests, RUN_TIMEOUT_S)

    def _submit(self, prompt: Sequence[int], max_tokens: int, grammar: str = "") -> None:
        self._num_requests += 1
        # A grammar requires a stop token; these outputs never reach it.
        sampling = SamplingParams(max_tokens, grammar=grammar, stop_token_ids=(0,) if grammar else ())
        self._worker.submit(f"r{self._num_requests}", prompt, sampling)


def build_alone(config: EngineConfig, on_progress: Callable[[str], None]) -> EngineBase:
    return build_engine(config, INCARNATION, on_progress)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a directory with a model's config.json; its weights are random")
    parser.add_argument("--attention-backend", choices=(AUTO, *ATTENTION_BACKENDS.names), default=AUTO)
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default=QUANTIZATIONS[0], help="fp8: FP8 weights")
    parser.add_argument("--kv-cache-dtype", choices=tuple(KV_CACHE_DTYPES), default="auto", help="data type of pages")
    parser.add_argument("--cuda-graph-max-bs", type=int, default=256, metavar="N")
    parser.add_argument("--disable-overlap", action="store_true", help="no overlap of host work and forwards")


def open_model(parser: argparse.ArgumentParser, directory: Path, quantization: str = QUANTIZATIONS[0]) -> ModelConfig:
    """Return the model's configuration; without a model or a GPU, exit with status 2."""
    try:
        if not directory.is_dir():
            raise ValueError(f"--model {directory} is no directory; it must be one with a model's config.json")
        model = ModelConfig.from_dir(directory).quantized(quantization)
        if not torch.cuda.is_available():
            raise ValueError(f"{why_no_gpu()}; run this on a machine with a GPU")
    except ValueError as error:
        parser.exit(exit_codes.USAGE, f"{parser.prog}: {error}\n")
    return model


def build_loop(
    arguments: argparse.Namespace,
    num_tokens: int,
    max_batch_size: int,
    on_progress: Callable[[str], None],
    build: BuildEngine = build_alone,
    degree: int = 1,
) -> Loop:
    """Build an engine in bfloat16 on the GPU. Args: num_tokens: capacity of the pool; degree: number of ranks."""
    model = ModelConfig.from_dir(Path(arguments.model))
    engine = build_dummy_engine(
        arguments.model,
        on_progress,
        build,
        degree=degree,
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
        num_pages=-(-num_tokens // PAGE_SIZE),
        attention_backend=arguments.attention_backend,
        cuda_graph_max_bs=arguments.cuda_graph_max_bs,
        max_chunk_tokens=CHUNK_SIZE,
        max_batch_size=max_batch_size,
    )
    # As in a worker's process.
    freeze_objects()
    collect_seldom()
    prefill = PrefillConfig(CHUNK_SIZE, overlap=not arguments.disable_overlap)
    decode = DecodeConfig(max_batch_size, overlap=not arguments.disable_overlap)
    return Loop(engine, prefill, decode, model.vocab_size)


def build_dummy_engine(
    model_dir: str, on_progress: Callable[[str], None], build: BuildEngine = build_alone, **options: Any
) -> EngineBase:
    """Build an engine with random bfloat16 weights on the GPU."""
    config = EngineConfig(
        model_dir, load_format="dummy", device="cuda", dtype="bfloat16", page_size=PAGE_SIZE, **options
    )
    return build(config, on_progress)
