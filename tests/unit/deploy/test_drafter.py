from pathlib import Path

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.drafter import with_drafter
from tests.cluster.conftest import save_tiny_model


def test_names_become_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path / "small")
    monkeypatch.chdir(tmp_path)
    for source in ("draft", "eagle"):
        found = with_drafter(ClusterConfig("m", speculation=f"{source}:small"), "auto")
        assert found.speculation == f"{source}:{tmp_path / 'small'}"
        # Prefill workers write the drafter's pages too.
        assert found.engine("/m").drafter == found.speculation
    for speculation in ("mtp", "auto", "off"):
        config = ClusterConfig("m", speculation=speculation)
        assert with_drafter(config, "auto") is config
        assert config.engine("/m").drafter == ("mtp" if speculation == "mtp" else "")


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        ("draft:absent", "^`speculation` draft:absent names no drafter: model 'absent' not found"),
        ("eagle:absent", "^`speculation` eagle:absent names no drafter: absent is not a directory"),
        ("eagle:.", "has no safetensors weights"),
    ],
)
def test_absent_drafters_are_refused(
    speculation: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        with_drafter(ClusterConfig("m", speculation=speculation), "auto")
    if speculation == "eagle:.":
        assert with_drafter(ClusterConfig("m", speculation=speculation), "dummy").speculation == f"eagle:{tmp_path}"


@pytest.mark.parametrize("speculation", ["draft", "draft:", "mtp:x", "eagle"])
def test_incomplete_values_are_refused(speculation: str) -> None:
    with pytest.raises(ValueError, match="`speculation` must be one of draft:MODEL, eagle:DIR, mtp, not"):
        ClusterConfig("m", speculation=speculation)


def test_several_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^`speculation` mtp is for workers of one rank: "):
        ClusterConfig("m", tp=2, speculation="mtp")


@pytest.mark.parametrize("speculation", ["draft:m", "eagle:.", "mtp"])
def test_engines_on_gpus_have_drafters_and_graphs_of_drafts(speculation: str) -> None:
    engine = ClusterConfig("m", device="cuda", speculation=speculation).engine("/m")
    assert engine.drafter == speculation and engine.max_drafts > 0
    assert ClusterConfig("m", device="cuda", speculation="ngram").engine("/m").drafter == ""
