"""Grammars of several clients at the compilers of one worker."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from llguidance import LLMatcher

from tandem.engine.grammars import Constraint, Grammars
from tandem.router.text.grammar_check import translate
from tests.fakes.tokenizer_files import byte_level, save

DEADLINE_S = 60.0
NUM_HOARDED = 60


class Compiling:
    """Grammars whose compilers wait for `go_on`.

    Attributes:
        begun: texts, in the order in which their compilation began.
    """

    def __init__(self, grammars: Grammars, patch: pytest.MonkeyPatch) -> None:
        self.grammars = grammars
        self.begun: list[str] = []
        self._may_end = threading.Semaphore(0)
        compile_grammar = grammars._compile

        def compile_slowly(text: str) -> LLMatcher:
            self.begun.append(text)
            assert self._may_end.acquire(timeout=DEADLINE_S)
            return compile_grammar(text)

        patch.setattr(grammars._compilers, "_compile", compile_slowly)

    def go_on(self, num_grammars: int) -> None:
        self._may_end.release(num_grammars)


@pytest.fixture
def compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiling]:
    grammars = Grammars.of_model(save(tmp_path, byte_level(), {"eos_token_id": [257]}), 270)
    assert grammars is not None
    compiling = Compiling(grammars, monkeypatch)
    yield compiling
    grammars.close()
    compiling.go_on(10 * NUM_HOARDED)


def text_of(number: int) -> str:
    return translate("choice", json.dumps([f"option {number}"]))


def wait_for(constraint: Constraint) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not constraint.is_ready:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert not constraint.error


def wait_for_begun(compiling: Compiling, *texts: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not set(texts) <= set(compiling.begun):
        assert time.monotonic() < deadline, compiling.begun
        time.sleep(0.001)


def test_another_client_finds_a_thread_at_once(compiling: Compiling) -> None:
    hoarded = [compiling.grammars.constraint(text_of(i), client="many") for i in range(NUM_HOARDED)]
    wait_for_begun(compiling, text_of(0))
    compiling.grammars.constraint(text_of(NUM_HOARDED), client="one")
    # None of the first client's has ended.
    wait_for_begun(compiling, text_of(NUM_HOARDED))
    compiling.go_on(NUM_HOARDED + 1)
    for constraint in hoarded:
        wait_for(constraint)


def test_clients_take_turns(compiling: Compiling) -> None:
    clients = ("a", "b", "c")
    all_of_them = [
        compiling.grammars.constraint(text_of(100 * k + i), client=client)
        for k, client in enumerate(clients)
        for i in range(10)
    ]
    compiling.go_on(len(all_of_them))
    for constraint in all_of_them:
        wait_for(constraint)
    # The last client's first came after a few of the others'.
    assert compiling.begun.index(text_of(200)) < 12


def test_one_grammar_of_two_clients_comes_with_the_earlier_turn(compiling: Compiling) -> None:
    for i in range(NUM_HOARDED):
        compiling.grammars.constraint(text_of(i), client="many")
    last = text_of(NUM_HOARDED - 1)
    wait_for_begun(compiling, text_of(0))
    shared = compiling.grammars.constraint(last, client="one")
    wait_for_begun(compiling, last)
    compiling.go_on(NUM_HOARDED)
    wait_for(shared)
    assert compiling.begun.count(last) == 1


def test_grammars_that_nobody_waits_for_are_not_compiled(compiling: Compiling) -> None:
    # Their requests have left, and 64 later grammars took their places.
    for i in range(200):
        compiling.grammars.constraint(text_of(i), client="many")
    compiling.go_on(200)
    wait_for(compiling.grammars.constraint(text_of(199), client="many"))
    assert len(compiling.begun) <= 66


def test_an_invalid_grammar_is_an_error_and_the_next_is_compiled(compiling: Compiling) -> None:
    bad = compiling.grammars.constraint("start: no grammar", client="a")
    good = compiling.grammars.constraint(text_of(1), client="a")
    compiling.go_on(2)
    wait_for(good)
    assert bad.is_ready and bad.error
