"""Paths of adapters that are loaded while a cluster serves."""

from pathlib import Path

import pytest

from tandem.engine.config import EngineConfig
from tandem.worker.adapter_check import AdapterCheck, path_below


def test_relative_and_absolute_paths_below_the_root(tmp_path: Path) -> None:
    (tmp_path / "root/a").mkdir(parents=True)
    root = str(tmp_path / "root")
    assert path_below(root, "a") == path_below(root, f"{root}/a") == path_below(root, "../root/a")
    assert path_below(root, "a") == (tmp_path / "root/a").resolve()


@pytest.mark.parametrize("path", ["../other", "/etc", "link", "a/../../other"])
def test_no_path_leads_out_of_the_root(tmp_path: Path, path: str) -> None:
    (tmp_path / "root/a").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "root/link").symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match=f"{path} lies outside --lora-root"):
        path_below(str(tmp_path / "root"), path)


def test_a_missing_directory_and_a_missing_root_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no directory a below --lora-root"):
        path_below(str(tmp_path), "a")
    with pytest.raises(ValueError, match="start it with --lora-root"):
        path_below("", "a")


def test_an_engine_without_slots_takes_none(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match="start the cluster with --max-loras"):
        AdapterCheck(EngineConfig(model_dir="nowhere"), str(tmp_path))("a")
