"""Models with FP8 weights on a GPU, against transformers in float32 with the dequantized weights."""

import copy
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tandem.engine.batch import Batch, ForwardMode
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.layers.fp8 import as_quantized
from tandem.engine.layers.ops import TorchOps
from tandem.engine.models.base import Model
from tandem.engine.models.build import build_model
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.quantization import AT_LOAD, Quantization
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.weights.loader import load_weights
from tandem.engine.weights.resolve import resolve_model
from tests.fakes.fp8_checkpoints import VOCAB_SIZE, make_model, save_fp8
from tests.fakes.fp8_schemes import KINDS

pytestmark = pytest.mark.usefixtures("all_prefill_graphs")
ROOT = Path(__file__).parents[4]
PAGE_SIZE = 16
BATCHES = (1, 16, 64, 256)
# Short enough for the small-batch kernel; prompt and output fit a page.
PROMPT_LEN, NUM_STEPS = 8, 4
LONG_PROMPT = 512
# Allowed error without quantized inputs, relative to transformers' own bfloat16 error.
MAX_RATIO_TO_BFLOAT16 = 2.0
# Quantized inputs also differ in a float32 simulation; smaller differences may flip a rounding.
MAX_RATIO_TO_SIMULATED = 1.3
# For one row of logits instead of hundreds.
MAX_RATIO_OF_FEW = 2.0


@dataclass(frozen=True)
class Checkpoint:
    """Attributes: reference: float32 on the GPU, with the dequantized weights."""

    path: Path
    reference: PreTrainedModel
    quantization: Quantization
    input_scales: dict[str, torch.Tensor]

    @torch.inference_mode()
    def logits(self, token_ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return logits after each token: (num_sequences, num_tokens, vocab_size)."""
        model: Any = self.reference
        if dtype is not torch.float32:
            model = copy.deepcopy(model).to(dtype)
            # Keep wavelengths in float32, as transformers does on loading in this dtype.
            for name, buffer in self.reference.named_buffers():
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, buffer)
        return model(token_ids.cuda()).logits.float()

    @contextmanager
    def quantised_inputs(self) -> Iterator[None]:
        def hook(name: str) -> Any:
            scale = self.input_scales.get(name)
            return lambda module, inputs: as_quantized(inputs[0], self.quantization.inputs, scale)

        handles = [
            module.register_forward_pre_hook(hook(name))
            for name, module in self.reference.named_modules()
            if isinstance(module, torch.nn.Linear) and name != "lm_head"
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@pytest.fixture(scope="module", params=[*KINDS, "at_load"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    torch.backends.cuda.matmul.allow_tf32 = False
    kind = request.param
    path = tmp_path_factory.mktemp(kind)
    family = "qwen3" if "static" in kind else "llama"
    # Sizes mostly differ, and block rows are multiples of 4, as the library requires.
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
    model: Any = make_model(family, num_hidden_layers=3, **sizes)
    tensors: dict[str, torch.Tensor] = {}
    if kind == "at_load":
        model.save_pretrained(path)
        quantization = AT_LOAD
        weights_of(model, path)
    else:
        tensors = save_fp8(model, path, kind)
        found = ModelConfig.from_dir(path).quantization
        assert found is not None
        quantization = found
    scales = {
        name.removesuffix(".input_scale"): tensor.cuda().view(1)
        for name, tensor in tensors.items()
        if name.endswith(".input_scale")
    }
    return Checkpoint(path, model.cuda(), quantization, scales)


@torch.no_grad()
def weights_of(model: PreTrainedModel, path: Path) -> None:
    """Give a model the dequantized weights of its plain ones loaded as FP8."""
    config = ModelConfig.from_dir(path).quantized("fp8")
    cpu = torch.device("cpu")
    plain = build_model(config, torch.float32, cpu)
    load_weights(plain, path, "auto", config.quantization, cpu, lambda doing: None)
    for name, weight in plain.named_parameters():
        model.get_parameter(name).copy_(weight)


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint) -> Engine:
    return make_engine(checkpoint.path, "fp8" if checkpoint.quantization.at_load else "auto")


def make_engine(path: Path, quantization: str, num_pages: int = 320, dtype: str = "bfloat16", **more: Any) -> Engine:
    config = EngineConfig(
        str(path),
        device="cuda",
        dtype=dtype,
        quantization=quantization,
        num_pages=num_pages,
        max_batch_size=max(BATCHES),
        **more,
    )
    return build_engine(config, "fp8", lambda doing: None)


@torch.inference_mode()
def logits(
    engine: Engine, mode: ForwardMode, sequences: Sequence[TokenSequence], num_tokens: int, graphs: bool
) -> torch.Tensor:
    """Return (num_sequences, vocab_size) logits after each sequence's last new token."""
    for sequence in sequences:
        sequence.extend(num_tokens)
    batch = Batch(mode, list(sequences))
    if graphs:
        if mode == "decode":
            assert engine._graphs is not None
            output = engine._graphs.run(batch, None)
        else:
            assert engine._prefill_graphs is not None
            output = engine._prefill_graphs.run(batch)
        assert output is not None
        found = output.logits.clone()
    else:
        engine._attention.plan(batch)
        rows = torch.tensor(batch.logits_rows(), dtype=torch.int64, device="cuda")
        ids, positions = batch.input_ids(engine.device), batch.positions(engine.device)
        found = engine.model.forward(ids, positions, engine._attention, rows)
    for sequence in sequences:
        sequence.complete_extend()
    return found.float()


def tokens(num_sequences: int, num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_sequences)
    return torch.randint(VOCAB_SIZE, (num_sequences, num_tokens), generator=generator)


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def bound(checkpoint: Checkpoint, token_ids: torch.Tensor, part: slice, is_quantized: bool) -> float:
    """Args: part: tokens after which logits are compared."""
    expected = checkpoint.logits(token_ids)[:, part]
    if is_quantized:
        with checkpoint.quantised_inputs():
            simulated = difference(checkpoint.logits(token_ids)[:, part], expected)
        few = expected.shape[0] * expected.shape[1] < 16
        return simulated * (MAX_RATIO_OF_FEW if few else MAX_RATIO_TO_SIMULATED)
    rounded = difference(checkpoint.logits(token_ids, torch.bfloat16)[:, part], expected)
    return rounded * MAX_RATIO_TO_BFLOAT16


def test_weights_stay_fp8(engine: Engine) -> None:
    dtypes = {name.rpartition("_")[2]: tensor.dtype for name, tensor in engine.model.named_parameters()}
    assert dtypes["proj.weight"] is torch.float8_e4m3fn
    assert engine.model.config.quantization is not None


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("batch_size", BATCHES)
def test_decode_steps(checkpoint: Checkpoint, engine: Engine, batch_size: int, graphs: bool) -> None:
    token_ids = tokens(batch_size, PROMPT_LEN + NUM_STEPS)
    pages = random.Random(0).sample(range(engine.pool.num_pages), batch_size)
    prompts = token_ids[:, :PROMPT_LEN].tolist()
    sequences = [TokenSequence(prompt, PROMPT_LEN, [page]) for prompt, page in zip(prompts, pages, strict=True)]
    for sequence in sequences:
        # One by one, so that prompts' inputs are not quantized.
        logits(engine, "prefill", [sequence], PROMPT_LEN, False)
    steps = []
    for step in range(NUM_STEPS):
        for sequence, token_id in zip(sequences, token_ids[:, PROMPT_LEN + step].tolist(), strict=True):
            sequence.token_ids.append(token_id)
        steps.append(logits(engine, "decode", sequences, 1, graphs))
    actual, part = torch.stack(steps, 1), slice(PROMPT_LEN, None)
    expected = checkpoint.logits(token_ids)[:, part]
    is_quantized = batch_size > 16 or torch.cuda.get_device_capability()[0] < 9
    error, largest = difference(actual, expected), bound(checkpoint, token_ids, part, is_quantized)
    assert error <= largest, f"{error:.2e} where {largest:.2e} is the most"


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_a_prefill(checkpoint: Checkpoint, engine: Engine, graphs: bool) -> None:
    token_ids = tokens(1, LONG_PROMPT)
    pages = random.Random(0).sample(range(engine.pool.num_pages), LONG_PROMPT // PAGE_SIZE)
    sequence = TokenSequence(token_ids[0].tolist(), LONG_PROMPT, pages)
    actual = logits(engine, "prefill", [sequence], LONG_PROMPT, graphs)
    # Bound over all rows, because a single row says little.
    expected = checkpoint.logits(token_ids)[:, -1]
    largest = bound(checkpoint, token_ids, slice(None), True) * MAX_RATIO_OF_FEW / MAX_RATIO_TO_SIMULATED
    error = difference(actual, expected)
    assert error <= largest, f"{error:.2e} where {largest:.2e} is the most"


def greedy(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    sequences, outputs = [], []
    for number, prompt in enumerate(prompts):
        pages = list(range(number * 8, number * 8 + 8))
        sequences.append(TokenSequence(list(prompt), len(prompt), pages))
        sequences[-1].extend(len(prompt))
    batch = Batch("prefill", sequences)
    for _ in range(num_tokens):
        token_ids = engine.forward(batch).token_ids()
        outputs.append(token_ids)
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            sequence.complete_extend()
            sequence.token_ids.append(token_id)
            sequence.extend(1)
        batch = Batch("decode", sequences)
    return [list(row) for row in zip(*outputs, strict=True)]


@pytest.mark.parametrize("num_prompts", [1, 24])
def test_greedy_outputs_are_the_same_twice(engine: Engine, num_prompts: int) -> None:
    prompts = [row.tolist() for row in tokens(num_prompts, 50)]
    first = greedy(engine, prompts, 40)
    assert len(first) == num_prompts and len(first[0]) == 40
    assert greedy(engine, prompts, 40) == first


@pytest.mark.parametrize("kind", ["fp8_static", "fp8_blocks", "at_load"])
def test_dummies_are_the_same_everywhere(tmp_path: Path, kind: str) -> None:
    model = make_model("llama")
    how = "fp8" if kind == "at_load" else "auto"
    if kind == "at_load":
        model.save_pretrained(tmp_path)
    else:
        save_fp8(model, tmp_path, kind)
    engines = [make_engine(tmp_path, how, load_format="dummy", cuda_graph_max_bs=0) for _ in range(2)]
    assert engines[0].model_fingerprint == engines[1].model_fingerprint
    outputs = [greedy(engine, [[1, 2, 3]] * 20, 8) for engine in engines]
    assert outputs[0] == outputs[1]
    loaded = make_engine(tmp_path, how, cuda_graph_max_bs=0)
    assert loaded.model_fingerprint != engines[0].model_fingerprint


NUM_STRETCHES, STRETCH = 8, 512
# In float32 simulation, rounding weights costs 2 % and inputs as much again: 3 % over all stretches, 0 to 5 % in one.
MAX_PERPLEXITY_RATIO = 1.06
MAX_RATIO_TO_SIMULATED_PERPLEXITY = 1.01


def test_the_perplexity_of_a_model_that_knows_english() -> None:
    from tokenizers import Tokenizer

    try:
        path = resolve_model("smollm2-135m-instruct")
    except ValueError as error:
        pytest.skip(str(error))
    text = (ROOT / "docs" / "architecture.md").read_text()
    token_ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode(text).ids[: NUM_STRETCHES * STRETCH]
    assert len(token_ids) == NUM_STRETCHES * STRETCH
    perplexities = {}
    for quantization in ("auto", "fp8"):
        engine = make_engine(path, quantization, num_pages=64)
        perplexities[quantization] = _perplexity(engine, engine.model, token_ids)
    config = ModelConfig.from_dir(path).quantized("fp8")
    simulated = DecoderModel(config, torch.float32, engine.device, TorchOps())
    load_weights(simulated, path, "auto", config.quantization, engine.device, lambda doing: None)
    reference = make_engine(path, "auto", num_pages=64, dtype="float32")
    perplexities["simulated"] = _perplexity(reference, simulated, token_ids)
    assert perplexities["fp8"] / perplexities["auto"] < MAX_PERPLEXITY_RATIO, perplexities
    ratio = perplexities["fp8"] / perplexities["simulated"]
    assert 1 / MAX_RATIO_TO_SIMULATED_PERPLEXITY < ratio < MAX_RATIO_TO_SIMULATED_PERPLEXITY, perplexities


@torch.inference_mode()
def _perplexity(engine: Engine, model: Model, token_ids: list[int]) -> float:
    """Args: engine: owner of the model's pages and attention."""
    losses = []
    for first in range(0, len(token_ids), STRETCH):
        stretch = token_ids[first : first + STRETCH]
        sequence = TokenSequence(stretch, STRETCH, list(range(STRETCH // PAGE_SIZE)))
        sequence.extend(STRETCH)
        batch = Batch("prefill", [sequence])
        engine._attention.plan(batch)
        ids, positions = batch.input_ids(engine.device), batch.positions(engine.device)
        found = model.forward(ids, positions, engine._attention, None).float()
        losses.append(torch.nn.functional.cross_entropy(found[:-1], torch.tensor(stretch[1:], device=engine.device)))
    return math.exp(sum(map(float, losses)) / len(losses))
