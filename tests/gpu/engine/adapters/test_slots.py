"""Adapters in engines on a GPU: against a CPU in float32, merged weights, and in CUDA graphs."""

import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tandem.adapters import AdapterRef
from tandem.engine.adapters.base import NO_ADAPTER
from tandem.engine.adapters.peft import read_info
from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import QUANTIZATIONS, EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.graph_runner import DecodeGraphs
from tandem.engine.models.config import ModelConfig
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import SamplingParams
from tests.cluster.conftest import VOCAB_SIZE
from tests.fakes.adapters import merged, write_adapter

MAX_RANK = 16
NUM_PAGES = 128
DEADLINE_S = 60.0
SCORED = SamplingParams(1, num_logprobs=0)
# Of log probabilities of the same kernels, and of logits in bfloat16 against float32: a CPU's differ by 0.8.
SAME_TOLERANCE, TOLERANCE, MEAN_TOLERANCE = 0.1, 1.0, 0.1


class Choice(NamedTuple):
    """The most likely token behind a context. Attributes: adapter: -1 for none."""

    adapter: int
    context: list[int]
    token_id: int


@pytest.fixture(scope="module")
def infos(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterRef]:
    root, config = tmp_path_factory.mktemp("adapters"), ModelConfig.from_dir(model_dir)
    paths = [
        write_adapter(root / str(seed), config, rank, seed=seed, size=0.3) for seed, rank in enumerate((8, 16, 3, 16))
    ]
    return [read_info(path, config, MAX_RANK) for path in paths]


def build(model_dir: Path, device: str, dtype: str, graphs: int = 0, quantization: str = QUANTIZATIONS[0]) -> Engine:
    config = EngineConfig(
        str(model_dir),
        device=device,
        dtype=dtype,
        quantization=quantization,
        num_pages=NUM_PAGES,
        cuda_graph_max_bs=graphs,
        prefill_cuda_graphs=graphs > 0,
        mixed_steps=True,
        max_loras=3,
        max_lora_rank=MAX_RANK,
    )
    return build_engine(config, f"adapters-{device}-{dtype}-{graphs}-{quantization}", lambda doing: None)


def acquired(engine: Engine, info: AdapterRef) -> int:
    assert engine.adapters is not None
    engine.adapters.add(info)
    deadline = time.monotonic() + DEADLINE_S
    while (slot := engine.adapters.acquire(info.content_hash)) is None:
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    return slot


class Run:
    """Prompts with three adapters and without, then steps, with an adapter that takes another's slot on the way."""

    def __init__(self, engine: Engine, infos: list[AdapterRef], forced: list[list[int]] | None = None) -> None:
        self.logprobs: list[float] = []
        self.ids: list[list[int]] = []
        self.choices: list[Choice] = []
        self._engine = engine
        self._forced = iter(forced or ())
        rng = random.Random(0)
        free = list(range(NUM_PAGES))

        def prompt(slot: int, length: int) -> TokenSequence:
            pages = [free.pop() for _ in range(8)]
            return TokenSequence(
                rng.choices(range(VOCAB_SIZE), k=length), length, pages, sampling=SCORED, adapter_slot=slot
            )

        slots = [acquired(engine, info) for info in infos[:3]]
        self._adapters = {NO_ADAPTER: -1} | {slot: number for number, slot in enumerate(slots)}
        first = [prompt(slot, 20 + slot) for slot in (*slots, NO_ADAPTER)]
        self._step([], first)
        for _ in range(4):
            self._step(first, [])
        leaving, *staying = first
        assert engine.adapters is not None
        engine.adapters.release(infos[0].content_hash)
        assert leaving.adapter_slot == acquired(engine, infos[3])
        self._adapters[leaving.adapter_slot] = 3
        late = prompt(leaving.adapter_slot, 30)
        self._step(staying, [late])
        for _ in range(4):
            self._step([*staying, late], [])

    def _step(self, decoded: list[TokenSequence], prompts: list[TokenSequence]) -> None:
        for sequence in (*decoded, *prompts):
            sequence.extend(sequence.remaining_len)
        output = self._engine.forward(Batch.of(decoded, prompts))
        self.ids.append(output.token_ids())
        self.logprobs += [found.logprob for found in output.logprobs() if found is not None]
        for sequence, token_id in zip((*decoded, *prompts), self.ids[-1], strict=True):
            adapter = self._adapters[sequence.adapter_slot]
            self.choices.append(Choice(adapter, list(sequence.token_ids), token_id))
        forced = next(self._forced, self.ids[-1])
        for sequence, token_id in zip((*decoded, *prompts), forced, strict=True):
            sequence.complete_extend()
            sequence.token_ids.append(token_id)


def test_float32_tokens_are_those_of_a_cpu(model_dir: Path, infos: list[AdapterRef]) -> None:
    expected = Run(build(model_dir, "cpu", "float32"), infos)
    found = Run(build(model_dir, "cuda", "float32"), infos)
    assert found.ids == expected.ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=2e-3)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_graphs_compute_what_single_launches_compute(
    model_dir: Path, infos: list[AdapterRef], monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    single = Run(build(model_dir, "cuda", "bfloat16", quantization=quantization), infos)
    engine = build(model_dir, "cuda", "bfloat16", 8, quantization)

    def refuse(self: DecodeGraphs, *_: Any) -> Any:
        raise AssertionError("an adapter that takes a slot needs no new graph")

    monkeypatch.setattr(DecodeGraphs, "_capture", refuse)
    graphed = Run(engine, infos, single.ids)
    # Graphs pad prompts, and products of other numbers of rows may be rounded differently. If that decides a near tie,
    # the log probabilities of both tokens are alike.
    assert graphed.logprobs == pytest.approx(single.logprobs, abs=SAME_TOLERANCE)
    same = [a == b for of_a, of_b in zip(graphed.ids, single.ids, strict=True) for a, b in zip(of_a, of_b, strict=True)]
    assert sum(same) >= 0.9 * len(same)


@pytest.mark.parametrize("graphs", [0, 8])
def test_greedy_tokens_are_those_of_merged_weights(model_dir: Path, infos: list[AdapterRef], graphs: int) -> None:
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    models = {-1: base} | {number: merged(base, Path(info.path)) for number, info in enumerate(infos)}
    run = Run(build(model_dir, "cuda", "bfloat16", graphs), infos)
    # Zero, but for near ties.
    behind = []
    for choice in run.choices:
        with torch.inference_mode():
            logits = models[choice.adapter](torch.tensor([choice.context])).logits[0, -1]
        behind.append(float(logits.max() - logits[choice.token_id]))
    assert max(behind) < TOLERANCE and sum(behind) / len(behind) < MEAN_TOLERANCE
