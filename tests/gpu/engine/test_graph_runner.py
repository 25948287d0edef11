import gc
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.graph_runner import DecodeGraphs


def test_the_collector_rests_while_graphs_are_captured(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    capture = DecodeGraphs._capture

    def watched(self: DecodeGraphs, *args: Any) -> Any:
        seen.append(gc.isenabled())
        return capture(self, *args)

    monkeypatch.setattr(DecodeGraphs, "_capture", watched)
    config = EngineConfig(str(model_dir), device="cuda", dtype="bfloat16", num_pages=16, cuda_graph_max_bs=8)
    build_engine(config, "graphs", lambda doing: None)
    assert seen and not any(seen)
    assert gc.isenabled()
