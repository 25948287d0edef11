"""One engine on one GPU through the whole engine loop: schedulers, caches, forward and sampling, without sockets.

Decode step: (time for 257 output tokens - time for 1) / 256, all requests at once, prompts of 1,024 tokens that share
nothing. Prefill: prompt tokens per second until every request has its first token. Weights are random. The floor of a
decode step is the time to read weights and KV once, at the copy bandwidth measured in the same run, or that of its
matrix products at the rate measured in the same run, whichever is longer.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from decode_worker.worker import make_decode_scheduler
from prefill_worker.worker import make_prefill_scheduler
from tandem.config import DecodeConfig, EngineConfig, PrefillConfig, WorkerConfig
from tandem.engine.build import build_engine
from tandem.engine.engine import Engine
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.models.config import ModelConfig
from tandem.messages import Admit, Finished, FirstToken, Prefill
from tandem.sampling_params import SamplingParams
from tandem.worker.base import Outbox
from tandem.worker.combined import CombinedRoom
from tandem.worker.events import FromRouter

PROMPT_LEN = 1024
NUM_STEPS = 256
BATCH_SIZES = (1, 8, 32, 128, 256)
PREFILLS = ((1, 512), (1, 8192), (8, 8192), (32, 2048), (64, 512))
CHUNK_SIZE = 16384
PAGE_SIZE = 16


class Ends(Outbox):
    """Counts the requests that have their first token, and those that have ended."""

    def __init__(self) -> None:
        self.num_first = 0
        self.num_ended = 0

    def to_router(self, message: Any) -> None:
        if isinstance(message, FirstToken):
            self.num_first += 1
            # A request of one token ends with it.
            self.num_ended += bool(message.finish_reason)
        self.num_ended += isinstance(message, Finished)

    def to_link(self, epoch: str, message: Any) -> None:
        raise AssertionError("there are no links")

    def close_link(self, epoch: str, reason: str) -> None:
        raise AssertionError("there are no links")


class Loop:
    """A worker of role both without its threads."""

    def __init__(self, engine: Engine, config: WorkerConfig, vocab_size: int) -> None:
        self._cache = CacheManager(config.engine.num_pages, config.engine.page_size)
        self._outbox = Ends()
        room = CombinedRoom(make_prefill_scheduler, make_decode_scheduler)
        self._scheduler = room.build_scheduler(engine, self._cache, self._outbox, config)
        self._vocab_size = vocab_size
        self._rng = random.Random(0)
        self._num_requests = 0

    def run(self, num_requests: int, prompt_len: int, max_tokens: int) -> float:
        """Seconds from the submission of all requests to the end of the last."""
        prompts = [tuple(self._rng.choices(range(self._vocab_size), k=prompt_len)) for _ in range(num_requests)]
        sampling = SamplingParams(max_tokens)
        target = self._outbox.num_ended + num_requests
        torch.cuda.synchronize()
        started = time.perf_counter()
        for prompt in prompts:
            self._num_requests += 1
            name = f"r{self._num_requests}"
            self._scheduler.receive(FromRouter(Admit(name, 0, prompt, (), sampling, 1e6)))
            self._scheduler.receive(FromRouter(Prefill(name, 0, prompt, (), sampling, "both-0")))
        while self._outbox.num_ended < target:
            self._scheduler.step()
        torch.cuda.synchronize()
        return time.perf_counter() - started


class Limits(NamedTuple):
    """Attributes: copy_bandwidth: bytes read and written per second; matmul_rate: FLOP per second, bfloat16."""

    copy_bandwidth: float
    matmul_rate: float


def measure_limits() -> Limits:
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_(0, 256)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    copy_s = _device_seconds(lambda: target.copy_(source))
    matmul_s = _device_seconds(lambda: torch.mm(a, b))
    return Limits(2 * source.numel() / copy_s, 2 * 8192**3 / matmul_s)


def _device_seconds(run: Any, num_runs: int = 20) -> float:
    """Median of several."""
    times = []
    for _ in range(num_runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[num_runs // 2]


def decode_floor(config: ModelConfig, limits: Limits, batch_size: int) -> float:
    """Seconds: bytes of weights and KV once, or the matrix products."""
    layer = config.hidden_size * config.head_dim * (2 * config.num_q_heads + 2 * config.num_kv_heads)
    layer += 3 * config.hidden_size * config.intermediate_size
    num_weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    kv_len = PROMPT_LEN + NUM_STEPS // 2
    kv_bytes = batch_size * kv_len * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2
    return max((2 * num_weights + kv_bytes) / limits.copy_bandwidth, 2 * num_weights * batch_size / limits.matmul_rate)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure one engine on one GPU.")
    parser.add_argument("--model", required=True, help="a directory with a model's config.json; its weights are random")
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=BATCH_SIZES)
    parser.add_argument("--cuda-graph-max-bs", type=int, default=256)
    parser.add_argument("--json", help="write the figures to this file too")
    arguments = parser.parse_args(argv)
    model_config = ModelConfig.from_dir(Path(arguments.model))
    limits = measure_limits()
    longest = max(arguments.batch_sizes, default=1) * (PROMPT_LEN + NUM_STEPS + PAGE_SIZE)
    num_pages = max(longest, 9 * 8192) // PAGE_SIZE
    engine_config = EngineConfig(
        arguments.model,
        "dummy",
        "cuda",
        "bfloat16",
        PAGE_SIZE,
        num_pages,
        cuda_graph_max_bs=arguments.cuda_graph_max_bs,
    )
    started = time.perf_counter()
    engine = build_engine(engine_config, "benchmark", lambda doing: None)
    ready_s = time.perf_counter() - started
    config = WorkerConfig(
        "both-0",
        "both",
        engine_config,
        "benchmark",
        model_config.max_position_embeddings,
        PrefillConfig(chunk_size=CHUNK_SIZE),
        DecodeConfig(max_batch_size=max(BATCH_SIZES)),
    )
    loop = Loop(engine, config, model_config.vocab_size)
    loop.run(2, PROMPT_LEN, 8)
    figures: dict[str, Any] = {"ready_s": ready_s, **limits._asdict(), "decode_ms": {}, "prefill_tok_s": {}}
    table = Table("what", "measured", "floor", "ratio", title=f"{Path(arguments.model).name}, bfloat16")
    for size in arguments.batch_sizes:
        loop.run(size, PROMPT_LEN, 2)
        once_s, many_s = loop.run(size, PROMPT_LEN, 1), loop.run(size, PROMPT_LEN, NUM_STEPS + 1)
        step_s, floor_s = (many_s - once_s) / NUM_STEPS, decode_floor(model_config, limits, size)
        figures["decode_ms"][size] = step_s * 1e3
        table.add_row(
            f"decode step, batch {size}", f"{step_s * 1e3:.2f} ms", f"{floor_s * 1e3:.2f} ms", f"{step_s / floor_s:.2f}"
        )
    for num_requests, prompt_len in PREFILLS:
        loop.run(num_requests, prompt_len, 1)
        rate = num_requests * prompt_len / loop.run(num_requests, prompt_len, 1)
        figures["prefill_tok_s"][f"{num_requests}x{prompt_len}"] = rate
        table.add_row(f"prefill {num_requests} x {prompt_len}", f"{rate:,.0f} tok/s", "", "")
    console = Console(width=100)
    console.print(table)
    console.print(
        f"copy {limits.copy_bandwidth / 1e12:.2f} TB/s, matmul {limits.matmul_rate / 1e12:.0f} TFLOP/s, "
        f"ready after {ready_s:.1f} s"
    )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
