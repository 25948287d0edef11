"""The adapters that a cluster starts with."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.deploy.adapters import read_adapters
from tandem.deploy.config.cluster_config import DEFAULT_MAX_LORAS, ClusterConfig
from tandem.engine.models.config import ModelConfig
from tests.fakes.adapters import write_adapter
from tests.fakes.model_config import TINY_LLAMA


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": ("sql",)}, "`lora` must be NAME=PATH, not 'sql'"),
        ({"lora": ("=path",)}, "an adapter's name must be 1 to 256"),
        ({"lora": ("a=x", "a=y")}, "must not give the same name twice"),
        ({"lora": ("m=x",), "served_model_name": ("m",)}, "'m' is a served_model_name"),
        ({"lora_root": "/adapters"}, "give admin_keys too"),
        ({"admin_keys": ("k",)}, "give lora_root too"),
        ({"admin_keys": ("k",), "lora_root": "/a", "api_keys": ("k 3",)}, "must not share a key"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterConfig("model", **options)


def test_slots_are_made_only_where_adapters_may_be_served() -> None:
    plain = ClusterConfig("model")
    assert plain.engine("model").max_loras == 0
    with_adapters = replace(plain, lora=("a=x",))
    assert with_adapters.engine("model").max_loras == DEFAULT_MAX_LORAS
    assert replace(with_adapters, max_loras=3).engine("model").max_loras == 3


def test_adapters_are_read_before_the_start(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    write_adapter(tmp_path / "good", model, rank=4)
    config = ClusterConfig(str(tmp_path / "model"), lora=(f"good={tmp_path}/good",))
    [entry] = read_adapters(config, config.engine(config.model), ("model",))
    assert entry.adapter is not None
    assert (entry.name, entry.adapter.rank, entry.adapter.path) == ("good", 4, str(tmp_path / "good"))
    with pytest.raises(ValueError, match="'good' is a name of the served model"):
        read_adapters(config, config.engine(config.model), ("good",))
    narrow = replace(config, max_lora_rank=2)
    with pytest.raises(
        ValueError, match=r"adapter 'good' cannot be served: .* has rank 4, more than --max-lora-rank 2"
    ):
        read_adapters(narrow, narrow.engine(config.model), ("model",))


def tiny_llama(directory: Path) -> ModelConfig:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TINY_LLAMA))
    return ModelConfig.from_dir(directory)
