"""Every input is taken at its bound and refused beyond, and docs/bad-input.md has the bounds."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.router.config import RouterConfig
from tandem.router.frontends import intake
from tandem.router.process import RouterProcess
from tests.fakes.attacked_router import KEY, NEVER_S, ScriptedWorkers
from tests.fakes.tokenizer_files import CHATML, byte_level, save
from tests.unit.docs.bound_trials import (
    MAX_CONNECTIONS,
    SHORT_MESSAGE_S,
    SHORT_SMALL_MESSAGE_S,
    TIMEOUT_S,
    Place,
)
from tests.unit.docs.bounds import PAGE, SECTIONS, Bound, written

ROOT = Path(__file__).parents[3]
# The least at which the limits on token ids are their own.
MAX_MODEL_LEN = 2**18
BOUNDS = [bound for bounds in SECTIONS.values() for bound in bounds]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    model_dir = save(tmp_path_factory.mktemp("model"), byte_level(), chat_template=CHATML)
    config = RouterConfig(
        *(str(model_dir), "fake", MAX_MODEL_LEN),
        grpc_port=0,
        http_port=0,
        api_keys=(KEY,),
        heartbeat_timeout_s=NEVER_S,
        stall_timeout_s=NEVER_S,
        max_connections=MAX_CONNECTIONS,
    )
    process = RouterProcess(config)
    with pytest.MonkeyPatch.context() as patch:
        # Servers take them at their start.
        patch.setattr(intake, "TIMEOUT_S", SHORT_MESSAGE_S)
        patch.setattr(intake, "SMALL_TIMEOUT_S", SHORT_SMALL_MESSAGE_S)
        addresses = process.start()
        process._loop_thread.call(ScriptedWorkers(process).start(), TIMEOUT_S)
        try:
            yield Place(process, addresses.grpc, addresses.http, config.max_body_bytes, patch)
        finally:
            process.stop()


@pytest.fixture
def place(running: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(running.process, running.grpc, running.http, running.max_body_bytes, monkeypatch)


@pytest.mark.parametrize("bound", [b for b in BOUNDS if not isinstance(b.trial, str)], ids=lambda bound: bound.input)
def test_an_input_is_taken_at_its_bound_and_refused_beyond(place: Place, bound: Bound) -> None:
    assert not isinstance(bound.trial, str)
    bound.trial(place)
    place.process.probe()


@pytest.mark.parametrize("bound", [b for b in BOUNDS if isinstance(b.trial, str)], ids=lambda bound: bound.input)
def test_other_bounds_have_a_test_of_their_own(bound: Bound) -> None:
    assert isinstance(bound.trial, str)
    path, _, name = bound.trial.partition("::")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)


def test_documented_bounds_are_the_tried_ones() -> None:
    page = PAGE.read_text()
    assert page == written(page), "run python -m tests.unit.docs.bounds"


def test_no_input_is_listed_twice() -> None:
    for title, bounds in SECTIONS.items():
        names = [bound.input for bound in bounds]
        assert len(names) == len(set(names)), title
