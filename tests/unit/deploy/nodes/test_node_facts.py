"""Facts of a node that may lack our code."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ray import cloudpickle

import tandem
from tandem.deploy.nodes.node_facts import SENT_MODULES, NodeFacts, node_facts

ROOT = Path(tandem.__file__).parents[1]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(10))
    return directory


def facts(model_dir: Path, package: str = "tandem") -> NodeFacts:
    return NodeFacts(**node_facts(package, str(model_dir)))


def elsewhere(model_dir: Path, python_path: str) -> NodeFacts:
    """Returns the facts from a Python that finds our code only there."""
    for module in SENT_MODULES:
        cloudpickle.register_pickle_by_value(module)
    try:
        sent = cloudpickle.dumps((node_facts, ("tandem", str(model_dir))))
    finally:
        for module in SENT_MODULES:
            cloudpickle.unregister_pickle_by_value(module)
    program = (
        "import sys, pickle; sys.path[:] = [p for p in sys.path if 'tandem' not in p]; sys.meta_path[:] = "
        "[f for f in sys.meta_path if 'editable' not in repr(f)]; sys.path.insert(0, sys.argv[1]); "
        "call, args = pickle.loads(sys.stdin.buffer.read()); sys.stdout.buffer.write(pickle.dumps(call(*args)))"
    )
    done = subprocess.run(
        [sys.executable, "-E", "-c", program, python_path], input=sent, capture_output=True, check=True, cwd="/"
    )
    return NodeFacts(**cloudpickle.loads(done.stdout))


def test_a_node_without_our_code_answers(model_dir: Path, tmp_path: Path) -> None:
    found = elsewhere(model_dir, str(tmp_path))
    assert found.sources == ""
    assert found.model == facts(model_dir).model and found.addresses == facts(model_dir).addresses
    assert found.available_bytes > 0


def test_the_digest_of_code_is_independent_of_its_place(model_dir: Path, tmp_path: Path) -> None:
    # An install has directories in place of the checkout's links.
    shutil.copytree(ROOT / "tandem", tmp_path / "tandem", ignore=shutil.ignore_patterns("__pycache__"))
    assert elsewhere(model_dir, str(tmp_path)).sources == facts(model_dir).sources != ""


def test_any_changed_file_changes_the_digest(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "a_package_of_this_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    before = facts(model_dir, package.name).sources
    (package / "more.py").write_text("x = 1")
    assert facts(model_dir, package.name).sources not in ("", before)


def test_a_model_is_identified_by_its_config_and_weight_sizes(model_dir: Path) -> None:
    found = facts(model_dir)
    (model_dir / "README.md").write_text("whatever")
    assert facts(model_dir).model == found.model
    (model_dir / "config.json").write_text('{"a": 1}')
    assert facts(model_dir).model != found.model
    (model_dir / "config.json").write_text("{}")
    (model_dir / "model.safetensors").write_bytes(bytes(11))
    assert facts(model_dir).model != found.model


def test_a_missing_model_is_an_error(model_dir: Path) -> None:
    (model_dir / "config.json").unlink()
    assert facts(model_dir).model_error == f"{model_dir}/config.json: No such file or directory"
    assert facts(model_dir / "missing").model_error
