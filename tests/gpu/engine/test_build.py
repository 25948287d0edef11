"""Engines of models that kernels cannot compute."""

import json
from pathlib import Path

import pytest

from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.cuda_build import SLOW_EXPERTS
from tandem.engine.token_sequence import TokenSequence
from tests.gpu.engine.layers.experts.test_counts import SETTINGS


@pytest.mark.parametrize(("size", "is_slow"), [(40, True), (128, False)])
def test_experts_of_any_size_are_served(
    size: int, is_slow: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS | {"moe_intermediate_size": size}))
    config = EngineConfig(
        str(tmp_path), load_format="dummy", device="cuda", dtype="bfloat16", num_pages=20, cuda_graph_max_bs=8
    )
    engine = build_engine(config, f"experts-{size}", list[str]().append)
    assert (engine._graphs is None) == is_slow
    assert (SLOW_EXPERTS in caplog.messages) == is_slow
    sequence = TokenSequence([1, 2, 3], 3, [0])
    sequence.extend(3)
    (token,) = engine.forward(Batch("prefill", [sequence])).token_ids()
    assert 0 <= token < SETTINGS["vocab_size"]
