from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.engine.weights.gguf.convert import convert_gguf
from tests.fakes.gguf_files import write_model
from tests.unit.engine.models.test_decoder import Checkpoint, make_checkpoint

Refusal = Callable[..., str]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Checkpoint]:
    names = ("mixtral", "qwen2", "qwen2-moe", "qwen3-moe", "olmoe")
    return {name: make_checkpoint(tmp_path_factory.mktemp(name), name) for name in names}


@pytest.fixture
def refusal(checkpoints: Mapping[str, Checkpoint], tmp_path: Path) -> Refusal:
    def refuse(
        model: str, metadata: Mapping[str, Any] | None = None, tensors: Mapping[str, np.ndarray | None] | None = None
    ) -> str:
        """Returns the one line that refuses a changed model, without the file's name."""
        source = write_model(tmp_path / "model.gguf", checkpoints[model].path, metadata, tensors)
        with pytest.raises(ValueError) as caught:
            convert_gguf(source, tmp_path / "out")
        before, separator, message = str(caught.value).partition(f"cannot convert {source}: ")
        assert before == "" and separator and "\n" not in message
        assert list(tmp_path.iterdir()) == [source]
        return message

    return refuse
