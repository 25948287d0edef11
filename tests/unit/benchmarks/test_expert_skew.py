"""Measured choices of experts, against even ones."""

import json
import random
from pathlib import Path

import pytest
import torch

from benchmarks import expert_skew
from benchmarks.expert_skew import BATCH_SIZES, record, skew_of
from tandem.engine.config import EngineConfig
from tandem.engine.models.experts import ExpertsConfig, Routing
from tests.fakes.model_config import TINY_EXPERTS, TINY_LLAMA

EXPERTS = ExpertsConfig(num_experts=64, intermediate_size=8, routing=Routing("softmax", 4))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    config = TINY_LLAMA | TINY_EXPERTS | {"num_hidden_layers": 3, "decoder_sparse_step": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3MoeForCausalLM"]}))
    return tmp_path


def test_even_choices_touch_as_many_experts_as_the_formula_says() -> None:
    rng = random.Random(0)
    chosen = torch.tensor([rng.sample(range(64), 4) for _ in range(4096)])
    skew = skew_of(3, chosen, 64, BATCH_SIZES)
    assert (skew.layer, skew.num_touched[1]) == (3, 4)
    for size, touched in skew.num_touched.items():
        assert touched == pytest.approx(EXPERTS.num_touched(size), rel=0.02)
    assert 1.0 < skew.max_over_mean < 1.3


def test_equal_choices_touch_few_experts() -> None:
    skew = skew_of(0, torch.tensor([[1, 5, 9, 63]] * 40), 64, BATCH_SIZES)
    # Batches of more tokens than there are cannot be drawn.
    assert skew.num_touched == {1: 4, 8: 4, 32: 4}
    assert skew.max_over_mean == 64 / 4


def test_every_token_of_every_sparse_layer_is_recorded(model_dir: Path) -> None:
    engine = EngineConfig(str(model_dir), load_format="dummy", num_pages=1)
    chosen = record(engine, [[1, 2, 3], [4] * 20])
    assert list(chosen) == [1]
    assert chosen[1].shape == (23, 2)
    assert all(len({*pair}) == 2 and {*pair} < set(range(4)) for pair in chosen[1].tolist())
    # A prompt's choices do not depend on others.
    assert torch.equal(record(engine, [[4] * 20])[1], chosen[1][3:])


def test_the_table_has_a_row_per_layer(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, results = tmp_path / "prompts.txt", tmp_path / "skew.json"
    prompts.write_text("1 2 3 4 5\n\n" + " ".join(map(str, range(32))) + "\n")
    flags = ["--model", str(model_dir), "--load-format", "dummy"]
    assert expert_skew.main([*flags, "--token-ids", str(prompts), "--json", str(results)]) == 0
    table = capsys.readouterr().out
    assert "37 tokens" in table and "even choice" in table and "experts of 32" in table
    (layer,) = json.loads(results.read_text())
    assert layer["layer"] == 1 and layer["num_touched"]["1"] == 2


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"], **dict.fromkeys(TINY_EXPERTS)}, [], "a model without experts"),
        ({}, ["--token-ids", "/dev/null"], "/dev/null has no token ids"),
        ({}, ["--load-format", "auto"], "has no safetensors weights"),
        ({"vocab_size": 16}, ["--token-ids", "prompts.txt"], "token ids must be below 16, not 1 to 16"),
        ({}, ["--prompt-len", "0"], "--num-prompts and --prompt-len must be at least 1"),
        ({}, ["--num-prompts", "0"], "--num-prompts and --prompt-len must be at least 1"),
        ({}, ["--prompt-len", "65"], "a prompt has 65 tokens, but at most 64 fit"),
    ],
)
def test_unmeasurable_models_take_one_line(
    model_dir: Path,
    change: dict[str, object],
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(model_dir)
    Path("prompts.txt").write_text("1 16\n")
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SystemExit) as stop:
        expert_skew.main(["--model", str(model_dir), "--load-format", "dummy", "--prompt-len", "8", *flags])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and error.count("\n") == 1
