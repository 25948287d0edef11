"""Engines of two ranks, and requests for them."""

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.both_worker.local_worker import LocalWorker
from tandem.decode_worker.config import DecodeConfig
from tandem.engine import dry_run
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.ranks.follower import FollowerLoop
from tandem.engine.ranks.recorder import ForwardRecorder
from tandem.messages import Finished, Tokens, WorkerMessage
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams
from tandem.worker.ranks.seat import Seat
from tandem.worker.ranks.serving import build_part
from tests.cluster.conftest import random_ids
from tests.gpu.rank_processes import started

WAVE_SIZE, MAX_TOKENS = 8, 250
# Of a wave.
TIMEOUT_S = 60.0


def follow(seat: Seat) -> None:
    engine = build_part(seat, lambda doing: None)
    FollowerLoop(engine, seat.memory.ring, seat.memory.progress).run()


def follow_with_prefill_graphs(seat: Seat) -> None:
    """For a leader whose LAUNCH_BOUND is the same.

    Ranks that share a GPU wait for their turns, so no prefill would seem bound by its launch: it would have no graph.
    """
    dry_run.LAUNCH_BOUND = math.inf
    follow(seat)


def config_of(model_dir: Path, degree: int, **settings: Any) -> EngineConfig:
    of_all: dict[str, Any] = {"device": "cuda", "num_pages": 400, "workers_per_gpu": 2, "max_batch_size": WAVE_SIZE}
    return EngineConfig(str(model_dir), degree=degree, **(of_all | settings))


@contextmanager
def engine_of_two(config: EngineConfig, run: Callable[[Seat], None] = follow) -> Iterator[Engine]:
    with started(2, run, config) as (processes, deaths):
        memory = processes.memory
        recorder = ForwardRecorder(memory.ring, memory.progress, config.page_size)
        engine = build_engine(config, "leader", lambda doing: None, processes.group, recorder)
        yield engine
        assert deaths.empty()
        engine.close()


def serve(
    engine: Engine, num_waves: int, chunk_size: int = 4096, max_tokens: int = MAX_TOKENS
) -> dict[tuple[int, ...], list[int]]:
    """Returns the outputs of random prompts. Each wave decodes as one batch."""
    prompts: dict[str, tuple[int, ...]] = {}
    outputs: dict[str, list[int]] = {}
    num_ended = 0

    def receive(message: WorkerMessage) -> None:
        nonlocal num_ended
        if isinstance(message, Tokens):
            for event in message.events:
                outputs[event.request_id] += event.token_ids
        num_ended += isinstance(message, Finished)

    worker = LocalWorker(engine, PrefillConfig(chunk_size), DecodeConfig(), receive)
    rng = random.Random(6)
    for wave in range(num_waves):
        deadline = time.monotonic() + TIMEOUT_S
        for i in range(WAVE_SIZE):
            name = f"{wave}-{i}"
            prompt_ids = random_ids(rng, rng.randint(1, 200))
            prompts[name], outputs[name] = tuple(prompt_ids), []
            worker.submit(name, prompt_ids, SamplingParams(max_tokens), arrival_ns=len(prompts))
        while num_ended < len(prompts):
            assert time.monotonic() < deadline, f"wave {wave} of {num_waves} is late"
            worker.step()
    return {prompts[name]: output for name, output in outputs.items()}
