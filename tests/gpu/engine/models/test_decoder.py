"""bfloat16 logits against transformers in float32, relative to transformers' own bfloat16 error."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.token_sequence import TokenSequence
from tests.gpu.random_models import LATENT, save_random_model

VOCAB_SIZE = 300
PAGE_SIZE = 16
NUM_PAGES = 64
NUM_TEACHER_FORCED = 64
MAX_RATIO = 2.0
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 16, "num_experts_per_tok": 4},
    "qwen2_moe": {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3_moe": {"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 128, "norm_topk_prob": True},
    "dots1": {
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
    },
    **LATENT,
}


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_random_model(path, request.param, **{"num_key_value_heads": 2, "head_dim": 64, **FAMILIES[request.param]})
    return path


class Steps:
    """Run one sequence through an engine's model and collect logits."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._free = list(range(NUM_PAGES))
        random.Random(0).shuffle(self._free)

    def sequence(self, prompt: list[int]) -> TokenSequence:
        pages = [self._free.pop() for _ in range((len(prompt) + NUM_TEACHER_FORCED) // PAGE_SIZE + 1)]
        return TokenSequence(list(prompt), len(prompt), pages)

    def sharing(self, other: TokenSequence, num_tokens: int) -> TokenSequence:
        """Return a sequence of the same tokens that shares the pages of the first `num_tokens`."""
        sequence = self.sequence(other.token_ids)
        sequence.page_ids = [*other.page_ids[: num_tokens // PAGE_SIZE], *sequence.page_ids[num_tokens // PAGE_SIZE :]]
        sequence.cached_len = sequence.device_len = num_tokens
        return sequence

    @torch.inference_mode()
    def logits(self, sequence: TokenSequence, num_tokens: int, mode: Any) -> torch.Tensor:
        """Return (num_rows, vocab_size); no rows before the last chunk."""
        sequence.extend(num_tokens)
        batch = Batch(mode, [sequence])
        engine = self._engine
        if mode == "decode" and engine._graphs is not None:
            output = engine._graphs.run(batch, None)
            assert output is not None
            logits = output.logits.clone()
        else:
            engine._attention.plan(batch)
            rows = torch.tensor(batch.logits_rows(), dtype=torch.int64, device="cuda")
            ids, positions = batch.input_ids(engine.device), batch.positions(engine.device)
            logits = engine.model.forward(ids, positions, engine._attention, rows)
        sequence.complete_extend()
        return logits.float().cpu()


def reference_logits(path: Path, dtype: torch.dtype, token_ids: list[int]) -> torch.Tensor:
    """Return transformers' logits after each token: (num_tokens, vocab_size)."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.to("cuda").eval()
    with torch.inference_mode():
        return model(torch.tensor([token_ids], device="cuda")).logits[0].float().cpu()


@pytest.mark.parametrize("backend", ["flashinfer", "triton", "reference"])
@pytest.mark.parametrize("max_graph", [0, 8])
@pytest.mark.parametrize(
    ("num_cached", "chunks"), [(0, (150,)), (0, (1, 37, 112)), (144, (6,))], ids=["whole", "chunked", "prefix hit"]
)
def test_logits(checkpoint: Path, backend: str, max_graph: int, num_cached: int, chunks: tuple[int, ...]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    if any(name in checkpoint.name for name in LATENT):
        backend = {"flashinfer": "auto", "triton": "latent_triton", "reference": "latent_reference"}[backend]
    engine = build_engine(
        EngineConfig(
            str(checkpoint),
            device="cuda",
            dtype="bfloat16",
            num_pages=NUM_PAGES,
            attention_backend=backend,
            cuda_graph_max_bs=max_graph,
        ),
        "numerics",
        lambda doing: None,
    )
    rng = random.Random(1)
    prompt_len = num_cached + sum(chunks)
    token_ids = rng.choices(range(VOCAB_SIZE), k=prompt_len + NUM_TEACHER_FORCED)
    steps = Steps(engine)
    sequence = steps.sequence(token_ids[:prompt_len])
    if num_cached:
        steps.logits(sequence, prompt_len, "prefill")
        sequence = steps.sharing(sequence, num_cached)
    ours = [steps.logits(sequence, n, "prefill") for n in chunks]
    for token_id in token_ids[prompt_len:]:
        sequence.token_ids.append(token_id)
        ours.append(steps.logits(sequence, 1, "decode"))
    actual = torch.cat(ours)
    expected, rounded = (
        reference_logits(checkpoint, dtype, token_ids)[prompt_len - 1 :] for dtype in (torch.float32, torch.bfloat16)
    )
    assert actual.shape == expected.shape
    own = (actual - expected).norm() / expected.norm()
    theirs = (rounded - expected).norm() / expected.norm()
    assert own <= MAX_RATIO * theirs, f"{own:.2e} where transformers has {theirs:.2e}"
