"""Two ranks that share a GPU compute what one rank computes, also as CUDA graphs."""

import math
from pathlib import Path

import pytest
import torch

from tandem.engine import dry_run
from tandem.engine.build import build_engine
from tests.cluster.conftest import Oracle
from tests.gpu.rank_engines import MAX_TOKENS, WAVE_SIZE, config_of, engine_of_two, follow_with_prefill_graphs, serve

pytestmark = pytest.mark.timeout(300)
# Of logits; bfloat16 has 8 bits.
MARGIN = 1.5


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
    monkeypatch.setattr(dry_run, "LAUNCH_BOUND", math.inf)
    config = config_of(model_dir, 2, dtype="bfloat16", cuda_graph_max_bs=WAVE_SIZE, mixed_steps=mixed_steps)
    oracle = Oracle(model_dir)
    with engine_of_two(config, follow_with_prefill_graphs) as engine:
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
