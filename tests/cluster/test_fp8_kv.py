"""8-bit KV pages, by head and of latents: a 1P1D cluster gives the tokens of a single engine without chunks."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.engine import Engine
from tandem.engine.token_sequence import TokenSequence
from tests.cluster.conftest import CHUNK_SIZE, Clusters, Oracle, ServedCluster, random_ids
from tests.cluster.tiny_experts import save_tiny_experts

MAX_TOKENS = 16
LENGTHS = (1, 16, 33, 47, 49, 96, 130, 200)
LATENTS = "deepseek_v2"
# Per-layer scales, as in quantized checkpoints. Those of keys are the latents' too.
SCALES = {
    "model.layers.0.self_attn.k_scale": 0.02,
    "model.layers.0.self_attn.v_scale": 0.013,
    "model.layers.1.self_attn.k_proj.k_scale": 0.05,
    "model.layers.1.self_attn.v_proj.v_scale": 0.03,
}


@pytest.fixture(scope="module", params=["llama", LATENTS])
def plain_model_dir(
    request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    if request.param != LATENTS:
        return tiny_model_dir
    directory = tmp_path_factory.mktemp(LATENTS)
    save_tiny_experts(directory, LATENTS)
    return directory


@pytest.fixture(scope="module")
def scaled_model_dir(plain_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from safetensors.torch import load_file, save_file

    directory = Path(copytree(plain_model_dir, tmp_path_factory.mktemp("scaled") / "tiny"))
    weights = directory / "model.safetensors"
    save_file(
        load_file(weights) | {name: torch.tensor([scale]) for name, scale in SCALES.items()},
        weights,
        metadata={"format": "pt"},
    )
    return directory


@pytest.fixture(scope="module")
def config(tiny_config: ClusterConfig, scaled_model_dir: Path) -> ClusterConfig:
    return replace(tiny_config, model=str(scaled_model_dir), kv_cache_dtype="fp8_e4m3")


@pytest.fixture(scope="module")
def alone(config: ClusterConfig) -> Iterator[Engine]:
    engine = build_engine(config.engine(config.model), "fp8-kv-alone", list[str]().append)
    yield engine
    engine.pool.close()


def generate(engine: Engine, prompt_ids: Sequence[int]) -> list[int]:
    """Decode greedily after an unchunked, uncached prefill."""
    num_pages = engine.pool.layout.num_pages_for(len(prompt_ids) + MAX_TOKENS)
    sequence = TokenSequence(list(prompt_ids), len(prompt_ids), list(range(num_pages)))
    sequence.extend(len(prompt_ids))
    output_ids = engine.forward(Batch("prefill", [sequence])).token_ids()
    while len(output_ids) < MAX_TOKENS:
        sequence.complete_extend()
        sequence.token_ids.append(output_ids[-1])
        sequence.extend(1)
        output_ids += engine.forward(Batch("decode", [sequence])).token_ids()
    return output_ids


@pytest.fixture(params=["shared_memory", pytest.param("tcp", marks=pytest.mark.slow)])
def served(request: pytest.FixtureRequest, clusters: Clusters, config: ClusterConfig) -> Iterator[ServedCluster]:
    served = clusters.get(replace(config, transport=request.param))
    yield served
    served.wait_clean()


def test_1p1d_matches_a_single_engine(served: ServedCluster, alone: Engine, plain_model_dir: Path) -> None:
    rng = random.Random(1)
    stem = random_ids(rng, 80)
    prompts = [random_ids(rng, n) for n in LENGTHS] + [stem + random_ids(rng, n) for n in (37, 20, 5)]
    assert max(map(len, prompts)) > 2 * CHUNK_SIZE
    expected = [generate(alone, prompt) for prompt in prompts]
    found: list[Any] = []
    # The second round finds the prompts cached on both workers.
    for prompt, output_ids in [*zip(prompts, expected, strict=True)] * 2:
        answer = served.complete(prompt, max_tokens=MAX_TOKENS, ignore_eos=True)
        assert answer.token_ids == output_ids
        found.append(answer.last.handover)
    assert [h.prefill_cached_tokens for h in found[len(LENGTHS) : len(prompts)]] == [0, 80, 80]
    for prompt, handover in zip(prompts, found[len(prompts) :], strict=True):
        assert handover.prefill_cached_tokens == (len(prompt) - 1) // 16 * 16
        assert handover.decode_cached_tokens == len(prompt) // 16 * 16
    # Rounding must have had an effect.
    oracle = Oracle(plain_model_dir)
    assert expected != [oracle.generate(prompt, MAX_TOKENS, ignore_eos=True) for prompt in prompts]
