"""Llama against transformers: logits, greedy texts, checkpoints and configurations."""

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.batch import Batch, Phase
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.models.config import Llama3RopeScaling, ModelConfig
from tandem.engine.models.llama import LlamaModel
from tandem.engine.models.registry import build_model
from tandem.engine.request import Sequence

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
# What distinguishes the checkpoints under test; the rest is in `checkpoint`.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied_llama3": {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    "group_of_3": {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 16, "num_hidden_layers": 3},
    "biased_wide_heads": {"attention_bias": True, "mlp_bias": True, "head_dim": 32},
}
_names = itertools.count()


@dataclass(frozen=True)
class Checkpoint:
    reference: LlamaForCausalLM
    path: Path

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file in sorted(self.path.glob("*.safetensors")):
            yield from load_file(file).items()

    def load(self, dtype: torch.dtype) -> LlamaModel:
        model = build_model(ModelConfig.from_dir(self.path), dtype, CPU)
        assert isinstance(model, LlamaModel)
        model.load_weights(self.weights())
        return model


def make_checkpoint(path: Path, max_shard_size: str = "1GB", **changes: Any) -> Checkpoint:
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": None,
        **changes,
    }
    torch.manual_seed(0)
    reference = LlamaForCausalLM(LlamaConfig(**settings)).eval()
    with torch.no_grad():
        # Far from the initial values, at which norms and biases do nothing and logits are all alike.
        for name, parameter in reference.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    reference.save_pretrained(path, max_shard_size=max_shard_size)
    return Checkpoint(reference, path)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, which on a busy machine wait long for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), **VARIANTS[request.param])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("plain"))


class Runner:
    """A model with a pool of scattered pages."""

    def __init__(self, model: LlamaModel, page_size: int = 16, dtype: str = "float32") -> None:
        config = model.config
        layout = PageLayout(config.num_layers, page_size, config.num_kv_heads, config.head_dim, dtype)
        self.model = model
        self.pool = KvPool(layout, 2048 // page_size, f"test-models-{next(_names)}")
        self.pool.kv.fill_(float("nan"))
        self.attention = ReferenceAttention(self.pool, config.num_q_heads)
        self._free = list(range(self.pool.num_pages))
        random.Random(1).shuffle(self._free)

    def sequence(self, token_ids: list[int], max_len: int = 0, prefix: Iterable[int] = ()) -> Sequence:
        """A sequence whose first pages are `prefix`, which hold its tokens already."""
        pages = list(prefix)
        cached_len = len(pages) * self.pool.layout.page_size
        while len(pages) < self.pool.layout.num_pages_for(max(max_len, len(token_ids))):
            pages.append(self._free.pop())
        return Sequence(list(token_ids), len(token_ids), pages, cached_len=cached_len)

    def forward(self, phase: Phase, sequences: list[Sequence], extend_lens: list[int]) -> torch.Tensor:
        for sequence, extend_len in zip(sequences, extend_lens, strict=True):
            sequence.extend(extend_len)
        batch = Batch(phase, sequences)
        self.attention.plan(batch)
        rows = torch.tensor(batch.logits_rows(), dtype=torch.int64)
        logits = self.model.forward(batch.input_ids(CPU), batch.positions(CPU), self.attention, rows)
        assert logits.shape == (len(rows), VOCAB_SIZE) and logits.dtype == torch.float32
        for sequence in sequences:
            sequence.complete_extend()
        return logits

    def prefill(self, sequences: list[Sequence]) -> torch.Tensor:
        return self.forward("prefill", sequences, [s.remaining_len for s in sequences])

    def decode(self, sequences: list[Sequence], next_ids: list[int]) -> torch.Tensor:
        for sequence, token_id in zip(sequences, next_ids, strict=True):
            sequence.token_ids.append(token_id)
        return self.forward("decode", sequences, [1] * len(sequences))


def random_ids(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=num_tokens)


def expected_logits(reference: LlamaForCausalLM, token_ids: list[int]) -> torch.Tensor:
    """Logits after the last token, by transformers: (vocab_size,) float32."""
    with torch.inference_mode():
        return reference(torch.tensor([token_ids])).logits[0, -1].float()


def assert_logits(actual: torch.Tensor, reference: LlamaForCausalLM, sequences: list[Sequence]) -> None:
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
    theirs = LlamaForCausalLM.from_pretrained(checkpoint.path, dtype=torch.bfloat16).eval()
    exact = LlamaForCausalLM.from_pretrained(checkpoint.path, dtype=torch.bfloat16).eval().float()
    with torch.inference_mode():
        truth = exact(torch.tensor([prompt])).logits[0, 19:]
        their_error = (theirs(torch.tensor([prompt])).logits[0, 19:].float() - truth).abs()

    runner = Runner(checkpoint.load(torch.bfloat16), dtype="bfloat16")
    sequence = runner.sequence(prompt[:20], max_len=100)
    logits = [runner.prefill([sequence])]
    logits += [runner.decode([sequence], [token_id]) for token_id in prompt[20:]]
    our_error = (torch.cat(logits) - truth).abs()
    assert our_error.mean() <= 1.2 * their_error.mean()
    assert our_error.max() <= 2 * their_error.max()


def test_sharded_checkpoint_loads_alike(plain: Checkpoint, tmp_path: Path) -> None:
    sharded = make_checkpoint(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    prompt = random_ids(30)
    logits = []
    for checkpoint in (plain, sharded):
        runner = Runner(checkpoint.load(torch.float32))
        logits.append(runner.prefill([runner.sequence(prompt)]))
    assert torch.equal(*logits)


def test_checkpoint_shapes_are_what_a_checkpoint_holds(checkpoint: Checkpoint) -> None:
    model = checkpoint.load(torch.bfloat16)
    shapes = {name: (shape, dtype) for name, shape, dtype in model.checkpoint_shapes()}
    assert shapes == {name: (tuple(t.shape), torch.bfloat16) for name, t in checkpoint.weights()}


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, "model.layers.1.mlp.up_proj.weight is missing$"),
        ("lm_head.weight", None, "lm_head.weight is missing"),
        (
            "model.layers.2.mlp.up_proj.weight",
            torch.zeros(1),
            "model.layers.2.mlp.up_proj.weight is unexpected",
        ),
        ("model.norm.weight", torch.zeros(65), r"model.norm.weight has shape \(65,\), not \(64,\)"),
        (
            "model.layers.0.self_attn.k_proj.weight",
            torch.zeros(64, 64),
            r"k_proj.weight has shape \(64, 64\)",
        ),
        ("model.norm.weight", torch.zeros(64, dtype=torch.int8), "model.norm.weight has dtype torch.int8"),
    ],
)
def test_refuses_other_tensors(plain: Checkpoint, name: str, tensor: torch.Tensor | None, message: str) -> None:
    weights = dict(plain.weights())
    if tensor is None:
        del weights[name]
    else:
        weights[name] = tensor
    model = build_model(ModelConfig.from_dir(plain.path), torch.float32, CPU)
    with pytest.raises(ValueError, match=message):
        model.load_weights(weights.items())


def test_refuses_a_tensor_twice_and_ignores_rotary_buffers(plain: Checkpoint) -> None:
    model = build_model(ModelConfig.from_dir(plain.path), torch.float32, CPU)
    buffer = ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(8))
    model.load_weights([buffer, *plain.weights()])
    with pytest.raises(ValueError, match="comes twice"):
        model.load_weights([*plain.weights(), next(plain.weights())])


def test_tied_checkpoint_may_carry_the_head(tmp_path: Path) -> None:
    tied = make_checkpoint(tmp_path, tie_word_embeddings=True)
    weights = dict(tied.weights())
    assert "lm_head.weight" not in weights
    head = weights["model.embed_tokens.weight"].clone()
    model = build_model(ModelConfig.from_dir(tmp_path), torch.bfloat16, CPU)
    model.load_weights([("lm_head.weight", head), *weights.items()])
    with pytest.raises(ValueError, match=r"lm_head.weight differs"):
        model.load_weights([("lm_head.weight", head + 1), *weights.items()])
    with pytest.raises(ValueError, match=r"lm_head.weight has shape"):
        model.load_weights([("lm_head.weight", head[1:]), *weights.items()])


# config.json of Llama-3.1-8B-Instruct, without what says nothing about the computation.
OLD_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}


def read_config(tmp_path: Path, raw: dict[str, Any]) -> ModelConfig:
    # None removes a key.
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    return ModelConfig.from_dir(tmp_path)


def test_reads_both_forms_of_config(tmp_path: Path) -> None:
    config = read_config(tmp_path, OLD_CONFIG)
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 8192),
        eos_token_ids=(128001, 128008, 128009),
    )
    parameters = {"rope_theta": 500000.0, **OLD_CONFIG["rope_scaling"]}  # type: ignore[dict-item]
    new = {**OLD_CONFIG, "rope_theta": None, "rope_scaling": None, "rope_parameters": parameters}
    assert read_config(tmp_path, new) == config
    assert read_config(tmp_path, {**OLD_CONFIG, "rope_parameters": parameters}) == config


def test_config_defaults(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    absent = ("rope_scaling", "rope_theta", "num_key_value_heads", "tie_word_embeddings", "attention_bias")
    config = read_config(
        tmp_path,
        {
            **OLD_CONFIG,
            **dict.fromkeys(absent),
            "eos_token_id": 2,
            "sliding_window": 64,
            "use_sliding_window": False,
            "rope_interleaved": False,
        },
    )
    assert (config.rope_theta, config.rope_scaling) == (10000.0, None)
    assert (config.num_kv_heads, config.tie_word_embeddings, config.attention_bias) == (32, False, False)
    assert config.eos_token_ids == (2, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' is not supported; supported: LlamaForCausalLM",
        ),
        ({"architectures": None}, "architectures must name one architecture"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope type 'linear' is not supported; supported: default",
        ),
        ({"rope_scaling": {"factor": 2.0}}, "rope type 'default' with factor"),
        ({"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": None}}, "low_freq_factor is missing"),
        ({"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, "high_freq_factor must be greater"),
        ({"rope_scaling": "llama3"}, "rope_scaling must be an object"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}, "rope_parameters contradicts"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"rope_theta": 0}, "rope_theta must be a number greater than 0"),
        ({"sliding_window": 4096}, "sliding_window 4096 is in effect"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number"),
        ({"num_hidden_layers": 0}, "num_layers must be a whole number of at least 1, not 0"),
        ({"intermediate_size": 14336.0}, "intermediate_size must be a whole number"),
        ({"num_attention_heads": 33}, "hidden_size 4096 is not a multiple of 33"),
        ({"num_attention_heads": True}, "num_attention_heads must be a whole number"),
        ({"num_key_value_heads": 5}, "num_q_heads 32 is not a multiple of num_kv_heads 5"),
        ({"head_dim": 63}, "head_dim 63 is odd"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": [-1]}, "eos_token_id -1 is not a token id"),
    ],
)
def test_refuses_configs(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read_config(tmp_path, {**OLD_CONFIG, **changes})
    assert str(tmp_path / "config.json") in str(error.value)


def test_refuses_unreadable_configs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json: cannot be read: No such file"):
        ModelConfig.from_dir(tmp_path)
    for text, message in (("{", "is not JSON"), ("[]", "must be an object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            ModelConfig.from_dir(tmp_path)
