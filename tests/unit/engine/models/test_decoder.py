"""Every architecture against transformers: logits, greedy texts, checkpoints."""

import functools
import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tandem.engine.attention.base import AttentionBackend
from tandem.engine.attention.indexed_reference import IndexedReferenceAttention
from tandem.engine.attention.latent_reference import LatentReferenceAttention
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.batch import Batch, ForwardMode
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.engine.models.base import Model
from tandem.engine.models.build import build_model
from tandem.engine.models.config import ModelConfig
from tandem.engine.page_layout import page_layout_of
from tandem.engine.token_sequence import TokenSequence
from tests.fakes.random_weights import tiny_model

CPU = torch.device("cpu")
VOCAB_SIZE = 256
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# The texts below are up to 160 tokens long.
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "olmoe_normalized": {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "num_key_value_heads": 4},
    "qwen2-moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
    },
    "qwen3-moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "head_dim": 32,
    },
    "qwen3-moe_yarn": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "head_dim": 32,
        "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 8.0},
    },
    "qwen3-moe_some_dense": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
    },
    "dots1": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}
LATENT: dict[str, dict[str, Any]] = {
    # No latent of queries, as in V2-Lite.
    "deepseek-v2": {
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    "deepseek-v2_groups": {
        "num_key_value_heads": 4,
        "q_lora_rank": 40,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "n_shared_experts": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
        "rope_parameters": {**YARN_ROPE, "mscale": 0.5, "mscale_all_dim": 0.7},
    },
    "deepseek-v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 40,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    # Queries attend to less than they may.
    "deepseek-v32": {
        "num_key_value_heads": 4,
        "q_lora_rank": 40,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "index_n_heads": 12,
        "index_head_dim": 20,
        "index_topk": 19,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "glm4-moe-lite": {
        "num_key_value_heads": 4,
        "q_lora_rank": 40,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 4,
        # Larger than queries and keys.
        "v_head_dim": 20,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
}
# Settings that differ between the checkpoints; `make_checkpoint` has the rest.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied_llama3": {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    "llama_yarn": {"rope_parameters": {**YARN_ROPE, "attention_factor": 1.5, "truncate": False}},
    "llama_group_of_3": {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 16, "num_hidden_layers": 3},
    "llama_biased_wide_heads": {"attention_bias": True, "mlp_bias": True, "head_dim": 32},
    # The window is as long as the longest sequence below, the largest size without an effect.
    "mistral_wide_window": {"sliding_window": 153, "max_position_embeddings": 153},
    "mistral_tied_wide_heads": {"sliding_window": None, "tie_word_embeddings": True, "head_dim": 32},
    "qwen2": {},
    "qwen2_tied_llama3": {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    "qwen3_wide_heads": {"head_dim": 32},
    "qwen3_yarn": {"head_dim": 32, "rope_parameters": YARN_ROPE},
    **EXPERTS,
    **LATENT,
    "qwen3_tied_biased": {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
}
_names = itertools.count()


@dataclass(frozen=True)
class Checkpoint:
    reference: Any
    path: Path

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file in sorted(self.path.glob("*.safetensors")):
            yield from load_file(file).items()

    def load(self, dtype: torch.dtype) -> Model:
        model = build_model(ModelConfig.from_dir(self.path), dtype, CPU)
        model.load_weights(self.weights())
        return model


def make_checkpoint(path: Path, variant: str, max_shard_size: str = "1GB") -> Checkpoint:
    reference = tiny_model(variant.partition("_")[0], VOCAB_SIZE, VARIANTS[variant])
    reference.save_pretrained(path, max_shard_size=max_shard_size)
    return Checkpoint(reference, path)


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("plain"), "llama")


class Runner:
    def __init__(self, model: Model, page_size: int = 16, dtype: str = "float32") -> None:
        config = model.config
        layout = page_layout_of(config, page_size, dtype, "auto")
        self.model = model
        self.pool = CpuKvPool(layout, 2048 // page_size, f"test-models-{next(_names)}")
        self.numbers = self.pool.memory.view(getattr(torch, dtype))
        self.numbers.fill_(float("nan"))
        backend: type[AttentionBackend] = ReferenceAttention
        if config.latent is not None:
            backend = LatentReferenceAttention if config.indexer is None else IndexedReferenceAttention
        self.attention = backend(self.pool, config.num_q_heads)
        self._free = list(range(self.pool.num_pages))
        random.Random(1).shuffle(self._free)

    def sequence(self, token_ids: list[int], max_len: int = 0, prefix: Iterable[int] = ()) -> TokenSequence:
        """Return a sequence whose first pages, `prefix`, are already computed."""
        pages = list(prefix)
        cached_len = len(pages) * self.pool.layout.page_size
        while len(pages) < self.pool.layout.num_pages_for(max(max_len, len(token_ids))):
            pages.append(self._free.pop())
        return TokenSequence(list(token_ids), len(token_ids), pages, cached_len=cached_len)

    def forward(
        self, mode: ForwardMode, sequences: list[TokenSequence], extend_lens: list[int], num_mixed: int = 0
    ) -> torch.Tensor:
        for sequence, extend_len in zip(sequences, extend_lens, strict=True):
            sequence.extend(extend_len)
        batch = Batch(mode, sequences, num_mixed=num_mixed)
        self.attention.plan(batch)
        rows = torch.tensor(batch.logits_rows(), dtype=torch.int64)
        logits = self.model.forward(batch.input_ids(CPU), batch.positions(CPU), self.attention, rows)
        assert logits.shape == (len(rows), VOCAB_SIZE) and logits.dtype == self.model.dtype
        for sequence in sequences:
            sequence.complete_extend()
        return logits.float()

    def prefill(self, sequences: list[TokenSequence]) -> torch.Tensor:
        return self.forward("prefill", sequences, [s.remaining_len for s in sequences])

    def decode(self, sequences: list[TokenSequence], next_ids: list[int]) -> torch.Tensor:
        for sequence, token_id in zip(sequences, next_ids, strict=True):
            sequence.token_ids.append(token_id)
        return self.forward("decode", sequences, [1] * len(sequences))


def random_ids(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=num_tokens)


def expected_logits(reference: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Return transformers' logits after the last token: (vocab_size,) float32."""
    with torch.inference_mode():
        return reference(torch.tensor([token_ids])).logits[0, -1].float()


def assert_logits(actual: torch.Tensor, reference: PreTrainedModel, sequences: list[TokenSequence]) -> None:
    expected = torch.stack([expected_logits(reference, s.token_ids) for s in sequences])
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_prefills_and_decodes_match_transformers(checkpoint: Checkpoint, page_size: int) -> None:
    runner = Runner(checkpoint.load(torch.float32), page_size)
    prompt = random_ids(150)
    whole = runner.sequence(prompt, max_len=160)
    assert_logits(runner.prefill([whole]), checkpoint.reference, [whole])

    chunked = runner.sequence(prompt[:140], max_len=160)
    for extend_len in (1, 37, 5, 64):
        assert runner.forward("prefill", [chunked], [extend_len]).shape[0] == 0
    assert_logits(runner.prefill([chunked]), checkpoint.reference, [chunked])

    branch = runner.sequence(prompt[:48] + random_ids(20, seed=1), max_len=80, prefix=whole.page_ids[: 48 // page_size])
    short = runner.sequence(random_ids(7, seed=2), max_len=20)
    assert branch.cached_len == 48
    assert_logits(runner.prefill([branch, short]), checkpoint.reference, [branch, short])

    running = [short, whole, branch, chunked]
    for step in range(3):
        logits = runner.decode(running, random_ids(4, seed=3 + step))
        assert_logits(logits, checkpoint.reference, running)


def test_batched_prefill_with_unfinished_sequences(plain: Checkpoint) -> None:
    runner = Runner(plain.load(torch.float32), 3)
    a, b, c = (runner.sequence(random_ids(n, seed=n)) for n in (20, 31, 11))
    assert_logits(runner.forward("prefill", [a, b, c], [20, 9, 11]), plain.reference, [a, c])
    assert_logits(runner.prefill([b]), plain.reference, [b])


def test_one_forward_of_decoding_and_prompts_matches_transformers(checkpoint: Checkpoint) -> None:
    runner = Runner(checkpoint.load(torch.float32), 3)
    a, b = (runner.sequence(random_ids(n, seed=n), max_len=n + 8) for n in (50, 11))
    runner.prefill([a, b])
    chunked, branch = (
        runner.sequence(random_ids(40, seed=5)),
        runner.sequence([*a.token_ids[:24], *random_ids(9, seed=6)], prefix=a.page_ids[:8]),
    )
    chunks = [[(chunked, 7)], [(chunked, 30), (branch, 8)], [(chunked, 3), (branch, 1)]]
    for step, prompts in enumerate(chunks):
        for sequence in (a, b):
            sequence.token_ids += random_ids(1, seed=20 + step)
        sequences = [a, b, *(sequence for sequence, _ in prompts)]
        logits = runner.forward("mixed", sequences, [1, 1, *(n for _, n in prompts)], num_mixed=2)
        assert_logits(logits, checkpoint.reference, sequences if step == 2 else [a, b])


def test_only_wanted_rows_are_output_but_all_kv_is_written(checkpoint: Checkpoint) -> None:
    model = checkpoint.load(torch.float32)
    runner = Runner(model)
    sequences = [runner.sequence(random_ids(n, seed=n)) for n in (7, 20)]
    for sequence in sequences:
        sequence.extend(sequence.remaining_len)
    batch = Batch("prefill", sequences)
    runner.attention.plan(batch)
    forward = functools.partial(model.hidden_states, batch.input_ids(CPU), batch.positions(CPU), runner.attention)

    def pages() -> torch.Tensor:
        return runner.numbers[[page for s in sequences for page in s.page_ids]]

    everything = forward()
    written = pages()
    runner.numbers.fill_(float("nan"))
    # Graphs select rows in any order, with repeats.
    rows = torch.tensor([26, 6, 6, 0])
    torch.testing.assert_close(forward(rows), everything[rows])
    torch.testing.assert_close(pages(), written, equal_nan=True)
    runner.numbers.fill_(float("nan"))
    assert forward(rows[:0]).shape == (0, everything.shape[1])
    torch.testing.assert_close(pages(), written, equal_nan=True)


def test_greedy_tokens_equal_generate(checkpoint: Checkpoint) -> None:
    prompts = [random_ids(n, seed=n) for n in (4, 33, 90)]
    expected = [
        checkpoint.reference.generate(torch.tensor([p]), max_new_tokens=24, do_sample=False, pad_token_id=0)[0].tolist()
        for p in prompts
    ]
    runner = Runner(checkpoint.load(torch.float32))
    sequences = [runner.sequence(p, max_len=len(p) + 24) for p in prompts]
    logits = runner.prefill(sequences)
    for _ in range(23):
        logits = runner.decode(sequences, logits.argmax(-1).tolist())
    actual = [[*s.token_ids, token] for s, token in zip(sequences, logits.argmax(-1).tolist(), strict=True)]
    assert actual == expected


def test_bfloat16_is_as_exact_as_transformers(checkpoint: Checkpoint) -> None:
    prompt = random_ids(100)
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.bfloat16).eval()
    exact = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.bfloat16).eval().float()
    with torch.inference_mode():
        truth = exact(torch.tensor([prompt])).logits[0, 19:]
        their_error = (theirs(torch.tensor([prompt])).logits[0, 19:].float() - truth).abs()

    runner = Runner(checkpoint.load(torch.bfloat16), dtype="bfloat16")
    sequence = runner.sequence(prompt[:20], max_len=100)
    logits = [runner.prefill([sequence])]
    logits += [runner.decode([sequence], [token_id]) for token_id in prompt[20:]]
    our_error = (torch.cat(logits) - truth).abs()
    if runner.model.config.latent is not None:
        # Latents are multiplied in another order, so rounding changes the experts of other tokens than in transformers.
        assert our_error.mean(-1).median() <= 1.2 * their_error.mean(-1).median()
        return
    assert our_error.mean() <= 1.2 * their_error.mean()
    assert our_error.max() <= 2 * their_error.max()


def test_sharded_checkpoint_loads_the_same_weights(plain: Checkpoint, tmp_path: Path) -> None:
    sharded = make_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    prompt = random_ids(30)
    logits = []
    for checkpoint in (plain, sharded):
        runner = Runner(checkpoint.load(torch.float32))
        logits.append(runner.prefill([runner.sequence(prompt)]))
    assert torch.equal(*logits)


def test_parameters_match_the_checkpoint(checkpoint: Checkpoint) -> None:
    model = checkpoint.load(torch.bfloat16)
    loaded, held = dict(model.named_parameters()), dict(checkpoint.weights())
    assert loaded.keys() == held.keys()
    assert all(torch.equal(loaded[name], held[name].to(loaded[name].dtype)) for name in held)
