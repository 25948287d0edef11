"""Thousands of steps on a GPU short of pages, with random arrivals, aborts and given-back requests."""

import gc
import os
import time
from pathlib import Path

import pytest
import torch

from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tests.cluster.conftest import EOS_TOKEN_IDS, VOCAB_SIZE
from tests.fakes.scenario import CHUNK_SIZE, MAX_BATCH_SIZE, Scenario, matches_solo_run

NUM_STEPS = 20_000
NUM_WARMUP_STEPS = 2_000
CHECK_EVERY = 500
# Allowed growth of device memory after warm-up: libraries load some kernels on first use.
MAX_DRIFT_BYTES = 16 * 2**20
MAX_TORCH_DRIFT_BYTES = 2**20
NUM_EXACT_STEPS = 1_500
NUM_COMPARED = 50
# Limit of requests that differ from their solo run at a tie.
MAX_TIES = 2
# So few that running requests evict each other.
NUM_PAGES = 40
# Half of the largest step, so that larger ones run without a graph.
MAX_GRAPH = MAX_BATCH_SIZE // 2
SAMPLINGS = (
    lambda seed: {},
    lambda seed: {"stop_token_ids": tuple(EOS_TOKEN_IDS)},
    lambda seed: {"num_logprobs": 3},
    lambda seed: {"temperature": 0.9, "seed": seed},
    lambda seed: {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": seed, "num_logprobs": 0},
    lambda seed: {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "logit_bias": ((7, 2.0),)},
)


def config_of(model_dir: Path, dtype: str, backend: str, max_graph: int, *, mixed: bool) -> EngineConfig:
    return EngineConfig(
        str(model_dir),
        device="cuda",
        dtype=dtype,
        num_pages=NUM_PAGES,
        attention_backend=backend,
        cuda_graph_max_bs=max_graph,
        max_chunk_tokens=CHUNK_SIZE,
        max_batch_size=MAX_BATCH_SIZE,
        mixed_steps=mixed,
    )


def memory_in_use() -> tuple[int, int]:
    """Return the bytes that torch has allocated, and the process's device memory without torch's reserve."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), process_bytes()


def process_bytes() -> int:
    """Return this process's device memory; in containers, whose process ids differ, the device's used memory."""
    import pynvml  # with FlashInfer

    pynvml.nvmlInit()
    devices = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    used = [
        process.usedGpuMemory
        for device in devices
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(device)
        if process.pid == os.getpid() and process.usedGpuMemory
    ]
    free, total = torch.cuda.mem_get_info()
    return sum(used) or total - free


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mixed", [False, True], ids=["apart", "mixed"])
@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_many_steps_leak_no_pages_or_memory(model_dir: Path, backend: str, mixed: bool) -> None:
    config = config_of(model_dir, "bfloat16", backend, MAX_GRAPH, mixed=mixed)
    scenario = Scenario(build_engine(config, "scenario", lambda doing: None), VOCAB_SIZE, SAMPLINGS, seed=3)
    began = time.monotonic()
    num_worked = 0
    before = (0, 0)
    while num_worked < NUM_STEPS:
        # Waiting for the step in flight does not count as a step.
        if not scenario.step():
            continue
        num_worked += 1
        if num_worked == NUM_WARMUP_STEPS:
            scenario.drain()
            before = memory_in_use()
        elif num_worked % CHECK_EVERY == 0:
            scenario.check()
    scenario.drain()
    after = memory_in_use()
    print(f"{time.monotonic() - began:.1f} s, {len(scenario.finished)} requests, {scenario.num_given_back} given back")
    assert after[0] - before[0] <= MAX_TORCH_DRIFT_BYTES
    assert after[1] - before[1] <= MAX_DRIFT_BYTES
    # Which requests wait or go depends on how long steps take.
    assert min(scenario.num_given_back, scenario.num_aborted, len(scenario.finished)) > 50


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mixed", [False, True], ids=["apart", "mixed"])
def test_greedy_tokens_match_solo_runs(model_dir: Path, mixed: bool) -> None:
    """In float32, where logits hardly depend on the batch."""
    config = config_of(model_dir, "float32", "reference", 0, mixed=mixed)
    engine = build_engine(config, "scenario", lambda doing: None)
    scenario = Scenario(engine, VOCAB_SIZE, SAMPLINGS[1:4], seed=4)
    for _ in range(NUM_EXACT_STEPS):
        scenario.step()
    scenario.drain()
    assert scenario.num_given_back and scenario.num_aborted
    greedy = [request for request in scenario.finished if request.sampling.is_greedy][-NUM_COMPARED:]
    assert len(greedy) == NUM_COMPARED
    num_same = sum(matches_solo_run(request, engine, tie=1e-3) for request in greedy)
    assert num_same >= NUM_COMPARED - MAX_TIES
