"""Every GPU test belongs to one part of `make test-gpu`, and the parts' results are listed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.parts import HERE, PARTS, main, parts_of

ROOT = Path(__file__).parents[2]


def test_every_gpu_test_belongs_to_one_part() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False).stdout
    node_ids = re.findall(r"^tests/gpu/\S+?::.*$", collected, re.MULTILINE)
    files = {node_id.partition("::")[0] for node_id in node_ids}
    # A module that this machine cannot import is collected nowhere.
    assert files == {str(path.relative_to(ROOT)) for path in HERE.rglob("test_*.py")}
    assert {node_id: parts for node_id in node_ids if len(parts := parts_of(node_id)) != 1} == {}
    assert {part for node_id in node_ids for part in parts_of(node_id)} == set(PARTS)


def test_an_unknown_part_names_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-part"]) == 2
    error = capsys.readouterr().err
    assert "no part 'no-such-part'" in error and all(name in error for name in PARTS)


def test_the_results_list_every_part() -> None:
    listed = re.findall(
        r"^\| `([\w-]+)` \| ", (ROOT / "docs/gpu.md").read_text().partition("## Tests")[2], re.MULTILINE
    )
    assert listed == list(PARTS)
