"""Two ranks that share a GPU, with experts, latent attention and FP8 weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.build import build_engine
from tandem.engine.engine import Engine
from tests.cluster.conftest import EOS_TOKEN_IDS, Oracle, save_byte_tokenizer
from tests.cluster.tiny_experts import ClearOracle, save_tiny_experts
from tests.gpu.random_models import LATENT, save_random_model
from tests.gpu.rank_engines import WAVE_SIZE, config_of, engine_of_two, serve

pytestmark = pytest.mark.timeout(300)
MAX_TOKENS = 60
# Beyond twice the gaps of one rank, as a share of the logits' deviation. Random tokens have gaps of about 3.
SLACK = 0.02
_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 128, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "qwen3_moe": _EXPERTS, "deepseek_v3": LATENT["deepseek_v3"]}
CASES = [("llama", "fp8"), ("qwen3_moe", "fp8"), ("deepseek_v3", "auto")]


def save_checkpoint(directory: Path, family: str) -> None:
    """Saves a model with a tokenizer."""
    sizes = {"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, **FAMILIES[family]}
    save_random_model(directory, family, bos_token_id=None, eos_token_id=EOS_TOKEN_IDS, **sizes)
    save_byte_tokenizer(directory)


def gaps(oracle: Oracle, outputs: Mapping[tuple[int, ...], Sequence[int]]) -> torch.Tensor:
    """Returns by how much each token's logit is below the best, as a share of the logits' deviation."""
    found = []
    for prompt_ids, token_ids in outputs.items():
        logits = oracle.logits([*prompt_ids, *token_ids])[len(prompt_ids) - 1 : -1]
        found.append((logits.amax(-1) - logits[range(len(token_ids)), list(token_ids)]) / logits.std(-1))
    return torch.cat(found)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_experts_and_latents_have_transformers_tokens(tmp_path: Path, family: str) -> None:
    """In float32."""
    save_tiny_experts(tmp_path, family)
    oracle = ClearOracle(tmp_path)
    with engine_of_two(config_of(tmp_path, 2)) as engine:
        outputs = serve(engine, 2, max_tokens=MAX_TOKENS)
    assert len(outputs) == 2 * WAVE_SIZE
    for prompt_ids, token_ids in outputs.items():
        assert len(token_ids) == MAX_TOKENS and oracle.confirms(prompt_ids, token_ids)


@pytest.mark.parametrize(("family", "quantization"), CASES)
def test_two_ranks_are_as_close_to_transformers_as_one(
    tmp_path: Path, family: str, quantization: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In bfloat16 and with FP8 weights, in graphs, and again from cached prefixes."""
    save_checkpoint(tmp_path, family)
    settings = {"dtype": "bfloat16", "quantization": quantization, "cuda_graph_max_bs": WAVE_SIZE}
    oracle = Oracle(tmp_path)

    def served(engine: Engine) -> torch.Tensor:
        return torch.cat([gaps(oracle, serve(engine, 1, 64, MAX_TOKENS)) for _ in range(2)])

    alone = served(build_engine(config_of(tmp_path, 1, **settings), "alone", lambda doing: None))
    with engine_of_two(config_of(tmp_path, 2, **settings)) as engine:
        ranks = served(engine)
    with capsys.disabled():
        print(f"\nmean gap of one rank {alone.mean():.4f}, of two {ranks.mean():.4f}", flush=True)
    assert ranks.mean() < 2 * alone.mean() + SLACK
