"""Engines with latents of 8 bits on a GPU: graphs and chunks keep their results, and little accuracy is lost."""

import random
from pathlib import Path

import pytest

from tests.cluster.conftest import VOCAB_SIZE
from tests.gpu.engine.test_engine import generate
from tests.gpu.random_models import LATENT, save_random_model
from tests.gpu.scenarios.test_quantized_pages import GREEDY, build, config, score


@pytest.fixture(scope="module")
def latent_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("latents")
    save_random_model(path, "deepseek_v2", **LATENT["deepseek_v2"])
    return path


@pytest.mark.parametrize("num_sequences", [1, 4, 8])
def test_graphs_match_single_launches(latent_dir: Path, num_sequences: int) -> None:
    """At sizes that graphs have: the cut into parts depends on the size."""
    prompt_lens = [5, 33, 16, 90, 1, 48, 64, 17][:num_sequences]
    with_graphs = build(config(latent_dir, cuda_graph_max_bs=16))
    without = build(config(latent_dir))
    assert generate(with_graphs, prompt_lens, 24, GREEDY) == generate(without, prompt_lens, 24, GREEDY)


@pytest.mark.parametrize("backend", ["latent_triton", "latent_reference"])
def test_prompt_scores_match_float32_whole_and_in_chunks(latent_dir: Path, backend: str) -> None:
    prompt = random.Random(1).choices(range(VOCAB_SIZE), k=700)
    # Decoded by kernels for 16 heads, and expanded from 256 new tokens on.
    exact = score(build(config(latent_dir, dtype="float32", kv_cache_dtype="auto")), prompt, [700])
    plain = score(build(config(latent_dir, kv_cache_dtype="auto")), prompt, [700])
    engine = build(config(latent_dir, attention_backend=backend))
    errors = [(score(engine, prompt, chunks) - exact).abs().mean() for chunks in ([700], [300, 1, 99, 300])]
    rounding = (plain - exact).abs().mean()
    print(f"{backend}: bfloat16 {rounding:.4f}, with latents of 8 bits {errors[0]:.4f}, in chunks {errors[1]:.4f}")
    assert max(errors) < rounding + 0.05
