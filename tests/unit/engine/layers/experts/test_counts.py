import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.graph_runner import DecodeGraphs
from tandem.engine.layers.experts.counts import ExpertCounts, LayerCounts, staged_rows
from tandem.engine.mixed_graphs import MixedGraphs, MixedSizes
from tandem.engine.prefill_graphs import PrefillGraphs
from tandem.engine.token_sequence import TokenSequence
from tests.fakes.graphs import FixedSizes, replay_in_torch
from tests.fakes.model_config import TINY_EXPERTS, TINY_LLAMA

CPU = torch.device("cpu")
PAGE_SIZE = 4
NUM_CHOSEN = TINY_EXPERTS["num_experts_per_tok"]
# Layer 1 is dense, the last layer is not.
SETTINGS: dict[str, Any] = {
    **TINY_LLAMA,
    **TINY_EXPERTS,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 4,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
    "head_dim": 8,
}


@pytest.mark.parametrize("bounds", [(2**31 - 1, 0, 0), (0, 0, 0), (3, 3, 3), (2, 4, 7), (0, 5, 9), (9, 0, 0)])
def test_rows_within_the_bounds_count(bounds: tuple[int, int, int]) -> None:
    rng = random.Random(1)
    experts = torch.tensor([rng.sample(range(5), 2) for _ in range(9)])
    expected = [100] * 5
    for row, chosen in enumerate(experts.tolist()):
        if row < bounds[0] or bounds[1] <= row < bounds[2]:
            for expert in chosen:
                expected[expert] += 1
    counts = torch.full((5,), 100)
    LayerCounts(counts, torch.tensor(bounds, dtype=torch.int32)).add(experts)
    assert counts.tolist() == expected


def test_staged_rows_apply_while_forward_passes_are_launched() -> None:
    counts = ExpertCounts([1, 3], 2, 4, CPU)
    staged = torch.from_numpy(staged_rows(3, 1, range(5, 7)))
    assert counts.of_layer(0) is None
    experts = torch.zeros(10, 1, dtype=torch.int64)

    def grown() -> list[int]:
        counts.reset()
        for layer in (1, 3):
            of_layer = counts.of_layer(layer)
            assert of_layer is not None
            of_layer.add(experts)
        return counts.counts[:, 0].tolist()

    assert grown() == [10, 10]
    with counts.only(staged):
        assert grown() == [5, 1]
        # A replay reads what was staged last.
        staged.copy_(torch.from_numpy(staged_rows(0, 2)))
        assert grown() == [0, 2]
    with pytest.raises(ValueError, match="launch"), counts.only(staged):
        raise ValueError("launch")
    assert grown() == [10, 10]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SETTINGS)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    config = EngineConfig(str(tmp_path), page_size=PAGE_SIZE, num_pages=100, num_threads=1, mixed_steps=True)
    engine = build_engine(config, "counts", lambda doing: None)
    yield engine
    engine.pool.close()


def prompt(length: int, first_page: int) -> TokenSequence:
    ids = random.Random(length).choices(range(SETTINGS["vocab_size"]), k=length)
    return TokenSequence(ids, length, range(first_page, first_page + 10))


def extended(sequences: Sequence[TokenSequence], num_tokens: int | None = None) -> Sequence[TokenSequence]:
    for s in sequences:
        s.extend(num_tokens or s.remaining_len)
    return sequences


def decoding(lengths: Sequence[int]) -> list[TokenSequence]:
    """Return sequences of which only the last token is not computed, each with pages of its own."""
    sequences = [prompt(length, 10 * index) for index, length in enumerate(lengths)]
    for s in sequences:
        s.cached_len = s.device_len = s.prompt_len - 1
    return sequences


def grown(engine: Engine, run: Callable[[], object]) -> "np.ndarray[Any, Any]":
    assert engine.expert_counts is not None
    before = engine.expert_counts.counts.clone()
    run()
    return (engine.expert_counts.counts - before).numpy()


def test_each_layer_counts_transformers_choices(engine: Engine, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    sequences = [prompt(17, 0), prompt(9, 10), prompt(12, 20)]
    # This chunk ends before its prompt and has no row in the last layer.
    sequences[2].extend(5)
    counted = grown(engine, lambda: engine.forward(Batch("prefill", [*extended(sequences[:2]), sequences[2]])))
    model = AutoModelForCausalLM.from_pretrained(tmp_path).float().eval()
    expected = np.zeros_like(counted)
    for s in sequences:
        with torch.no_grad():
            output = model(torch.tensor([s.token_ids[: s.device_len]]), output_router_logits=True)
        choices = [logits.topk(NUM_CHOSEN).indices for logits in output.router_logits if logits is not None]
        choices[-1] = choices[-1][-1:] if s.device_len == s.prompt_len else choices[-1][:0]
        for layer, chosen in enumerate(choices):
            for expert in chosen.flatten().tolist():
                expected[layer, expert] += 1
    assert engine.expert_counts is not None and engine.expert_counts.layers == (0, 2, 3)
    assert counted.sum(axis=1).tolist() == [NUM_CHOSEN * n for n in (31, 31, 2)]
    assert counted.tolist() == expected.tolist()


def assert_padding_does_not_count(
    engine: Engine, make_batch: Callable[[], Batch], run: Callable[[Batch], object]
) -> None:
    """Compare a padded forward pass with the same one without padding, on pages that it then overwrites."""
    expected = grown(engine, lambda: engine._run(make_batch(), None, lambda: None))
    assert expected.sum() > 0
    for _ in range(2):
        assert grown(engine, lambda: cast(Any, run(make_batch())).logits).tolist() == expected.tolist()


def test_graphs_do_not_count_padding(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_in_torch(monkeypatch)
    backend, lengths = FixedSizes(engine.pool), (5, 9, 3)
    engine.forward(Batch("prefill", extended([prompt(length, 10 * n) for n, length in enumerate(lengths)])))

    def decoded() -> Batch:
        return Batch("decode", extended(decoding(lengths)))

    def prompts() -> Batch:
        ends, goes_on = prompt(7, 40), prompt(20, 50)
        return Batch("prefill", [*extended([ends]), *extended([goes_on], 11)])

    def mixed() -> Batch:
        return Batch.of(decoded().sequences, prompts().sequences)

    def nothing(doing: str) -> None:
        pass

    assert engine.expert_counts is not None
    engine.expert_counts.reset()
    decode_graphs = DecodeGraphs(engine.model, backend, CPU, 8, 100, nothing)
    prefill_graphs = PrefillGraphs(engine.model, backend, CPU, (16, 32), 100, nothing)
    mixed_graphs = MixedGraphs(engine.model, backend, CPU, MixedSizes.grid((4, 7), (20, 24)), 100, nothing)
    # Neither captures nor their warm-ups count.
    assert not engine.expert_counts.counts.any()
    assert_padding_does_not_count(engine, decoded, lambda batch: decode_graphs.run(batch, None))
    assert_padding_does_not_count(engine, prompts, prefill_graphs.run)
    assert_padding_does_not_count(engine, mixed, lambda batch: mixed_graphs.run(batch, None))


def test_dense_model_counts_nothing(model_dir: str) -> None:
    engine = build_engine(EngineConfig(model_dir, load_format="dummy", num_pages=1), "dense", lambda doing: None)
    assert engine.expert_counts is None
    with engine.model.counting(torch.zeros(1)):
        pass
    engine.pool.close()
