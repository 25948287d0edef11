import json
from pathlib import Path

import pytest

from tests.fakes.model_config import TINY_LLAMA


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    return str(tmp_path)
