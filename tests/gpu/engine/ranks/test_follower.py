"""Two ranks that share a GPU compute what one rank computes, also as CUDA graphs."""

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

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
from tandem.worker.ranks.serving import use_device
from tests.cluster.conftest import Oracle, random_ids
from tests.gpu.rank_processes import started

pytestmark = pytest.mark.timeout(300)
WAVE_SIZE, MAX_TOKENS = 8, 250
# Of a wave.
TIMEOUT_S = 60.0
# Of logits; bfloat16 has 8 bits.
MARGIN = 1.5


def follow(seat: Seat) -> None:
    use_device("cuda", seat.order.ranks)
    engine = build_engine(seat.order.worker.engine, "follower", lambda doing: None, seat.group)
    FollowerLoop(engine, seat.memory.ring, seat.memory.progress).run()


def config_of(model_dir: Path, degree: int, **settings: Any) -> EngineConfig:
    of_all: dict[str, Any] = {"device": "cuda", "num_pages": 400, "workers_per_gpu": 2, "max_batch_size": WAVE_SIZE}
    return EngineConfig(str(model_dir), degree=degree, **(of_all | settings))


@contextmanager
def engine_of_two(config: EngineConfig) -> Iterator[Engine]:
    with started(2, follow, config) as (processes, deaths):
        memory = processes.memory
        recorder = ForwardRecorder(memory.ring, memory.progress, config.page_size)
        engine = build_engine(config, "leader", lambda doing: None, processes.group, recorder)
        yield engine
        assert deaths.empty()
        engine.close()


def serve(engine: Engine, num_waves: int, chunk_size: int = 4096) -> dict[tuple[int, ...], list[int]]:
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
            worker.submit(name, prompt_ids, SamplingParams(MAX_TOKENS), arrival_ns=len(prompts))
        while num_ended < len(prompts):
            assert time.monotonic() < deadline, f"wave {wave} of {num_waves} is late"
            worker.step()
    return {prompts[name]: output for name, output in outputs.items()}


def test_two_thousand_steps_have_the_tokens_of_one_rank(model_dir: Path) -> None:
    num_waves = -(-2000 // MAX_TOKENS)
    alone = build_engine(config_of(model_dir, 1), "alone", lambda doing: None)
    expected = serve(alone, num_waves)
    with engine_of_two(config_of(model_dir, 2)) as engine:
        assert serve(engine, num_waves) == expected
    assert all(len(output) == MAX_TOKENS for output in expected.values())


@pytest.mark.parametrize("mixed_steps", [False, True])
def test_graphs_of_two_ranks_compute_greedy_tokens(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, mixed_steps: bool
) -> None:
    num_replays = 0
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        nonlocal num_replays
        num_replays += 1
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    # Ranks that share a GPU wait for their turns, so no prefill would seem bound by its launch: it would have no graph.
    monkeypatch.setattr(dry_run, "LAUNCH_BOUND", math.inf)
    config = config_of(model_dir, 2, dtype="bfloat16", cuda_graph_max_bs=WAVE_SIZE, mixed_steps=mixed_steps)
    oracle = Oracle(model_dir)
    with engine_of_two(config) as engine:
        outputs = serve(engine, 1, chunk_size=64)
        # Prefills, and at least the decode steps of the last prompt.
        assert num_replays > MAX_TOKENS, f"only {num_replays} passes were graphs"
        # Now with cached prefixes.
        again = serve(engine, 1, chunk_size=64)
    for found in (outputs, again):
        for prompt_ids, token_ids in found.items():
            logits = oracle.logits([*prompt_ids, *token_ids])[len(prompt_ids) - 1 : -1]
            gaps = logits.max(-1).values - logits[range(len(logits)), token_ids]
            assert gaps.max() < MARGIN, f"token {int(gaps.argmax())} behind a prompt of {len(prompt_ids)}"
