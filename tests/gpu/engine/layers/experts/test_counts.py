"""Counters of experts on a GPU: by CUDA graphs with padding, and kernel by kernel."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.token_sequence import TokenSequence

pytestmark = pytest.mark.usefixtures("all_prefill_graphs")
PAGE_SIZE = 16
NUM_CHOSEN = 4
VOCAB_SIZE = 300
# Layer 1 is dense, the last layer is not.
SETTINGS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "num_experts": 16,
    "num_experts_per_tok": NUM_CHOSEN,
    "moe_intermediate_size": 128,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}
# Share of choices that another rounding may change.
MAX_CHANGED = 0.1


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SETTINGS)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    path: Path = tmp_path_factory.mktemp("models") / "tiny-experts"
    model.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(SETTINGS))
    config = EngineConfig(
        str(path),
        device="cuda",
        dtype="bfloat16",
        page_size=PAGE_SIZE,
        num_pages=500,
        cuda_graph_max_bs=20,
        prefill_cuda_graphs=True,
        mixed_steps=True,
    )
    engine = build_engine(config, "counts", lambda doing: None)
    assert engine.expert_counts is not None and engine.expert_counts.layers == (0, 2, 3)
    # Trial forward passes and captures do not count.
    assert not engine.expert_counts.counts.any()
    return engine


def decoding(num_sequences: int) -> list[TokenSequence]:
    """Return sequences that compute their last token, each with pages of its own."""
    rng = random.Random(num_sequences)
    sequences = []
    for index in range(num_sequences):
        ids = rng.choices(range(VOCAB_SIZE), k=rng.randrange(2, 60))
        s = TokenSequence(ids, len(ids), range(4 * index, 4 * index + 4))
        s.cached_len = s.device_len = len(ids) - 1
        s.extend(1)
        sequences.append(s)
    return sequences


def prompts(*num_tokens: int) -> list[TokenSequence]:
    """Return prompts of which this forward pass computes all tokens, of the last one all but one."""
    rng = random.Random(sum(num_tokens))
    sequences = []
    for index, number in enumerate(num_tokens):
        length = number + (index == len(num_tokens) - 1)
        pages = range(100 + 40 * index, 140 + 40 * index)
        sequences.append(TokenSequence(rng.choices(range(VOCAB_SIZE), k=length), length, pages))
        sequences[-1].extend(number)
    return sequences


def grown(engine: Engine, run: Callable[[], object]) -> torch.Tensor:
    assert engine.expert_counts is not None
    before = engine.expert_counts.counts.clone()
    with torch.inference_mode():
        assert run() is not None
    return (engine.expert_counts.counts - before).cpu()


def assert_counted(counted: torch.Tensor, num_tokens: int, num_rows: int) -> None:
    num_counted = torch.tensor([num_tokens, num_tokens, num_rows])
    assert counted.sum(dim=1).tolist() == (NUM_CHOSEN * num_counted).tolist()
    # No row chooses an expert twice.
    assert (counted.amax(dim=1) <= num_counted).all()


BATCHES: dict[str, Callable[[], Batch]] = {
    "decode, one row": lambda: Batch("decode", decoding(1)),
    "decode, padded": lambda: Batch("decode", decoding(9)),
    "decode, full": lambda: Batch("decode", decoding(20)),
    "prefill, padded": lambda: Batch("prefill", prompts(3, 47, 55)),
    "mixed, padded": lambda: Batch.of(decoding(5), prompts(3, 47, 55)),
    "mixed, full": lambda: Batch.of(decoding(20), prompts(100, 60)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_graphs_count_real_rows_alone(engine: Engine, name: str) -> None:
    batch = BATCHES[name]()
    assert engine._graphs is not None and engine._prefill_graphs is not None and engine._mixed_graphs is not None
    by_graph = [grown(engine, lambda: engine._run_graph(BATCHES[name](), None)) for _ in range(2)]
    by_kernel = grown(engine, lambda: engine._run(batch, None, lambda: None))
    for counted in (*by_graph, by_kernel):
        assert_counted(counted, batch.num_tokens, len(batch.logits_rows()))
    assert by_graph[0].equal(by_graph[1])
    assert int((by_graph[0] - by_kernel).abs().sum()) <= MAX_CHANGED * 2 * int(by_kernel.sum())


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 64, 65, 300, 1500, 4000])
def test_single_launches_count_every_row(engine: Engine, num_tokens: int) -> None:
    lengths = [num_tokens // 8] * 7 if num_tokens >= 64 else []
    batch = Batch("prefill", prompts(*lengths, num_tokens - sum(lengths)))
    assert_counted(grown(engine, lambda: engine._run(batch, None, lambda: None)), num_tokens, len(lengths))
