"""Outputs of earlier attempts, followed beside the engine thread."""

import gc
import json
import random
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, grammar_from

from tandem.engine import grammar_follower as module
from tandem.engine.grammars import Constraint, Grammars
from tandem.router.text.grammar_check import translate
from tests.fakes.tokenizer_files import byte_level, save

VOCAB_SIZE = 270
END = 257
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    directory = save(tmp_path_factory.mktemp("model"), byte_level(), {"eos_token_id": [END]})
    made = Grammars.of_model(directory, VOCAB_SIZE)
    assert made is not None
    return made


def ready(constraint: Constraint) -> Constraint:
    deadline = time.monotonic() + DEADLINE_S
    while not constraint.is_ready:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return constraint


def output_of(text: str) -> list[int]:
    tokenizer = byte_level()
    ids = {tokenizer.decode([i]): i for i in range(260)}
    return [ids[letter] for letter in text]


def mask(grammars: Grammars, constraint: Constraint) -> bytes:
    return grammars.masks([(constraint, (END,))]).tobytes()


def costly(num_rules: int) -> str:
    """Each "a" is parsed by all rules: thousandths of a second a token."""
    rules = "".join(f'rule_{i}: rule_{i} "a" | "a"\n' for i in range(num_rules))
    return grammar_from("lark", "start: " + " | ".join(f"rule_{i}" for i in range(num_rules)) + "\n" + rules)


def ambiguous(num_rules: int) -> str:
    """Without masks in between, a single token may take half a second."""
    rules = "".join(f'r{i}: "a" | "a" e\n' for i in range(num_rules))
    return grammar_from("lark", "start: e\ne: " + " | ".join(f"r{i}" for i in range(num_rules)) + " | e e\n" + rules)


SCHEMA = {
    "type": "array",
    "items": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}


@given(length=st.integers(1, 60), more=st.integers(0, 5), seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_begun_output_has_the_masks_of_an_uninterrupted_one(
    grammars: Grammars, length: int, more: int, seed: int
) -> None:
    grammar = translate("json_schema", json.dumps(SCHEMA))
    rng, prompt, output = random.Random(seed), [1, 2, 3], []
    whole = ready(grammars.constraint(grammar))
    begun: Constraint | None = None
    for place in range(length + more):
        whole.follow([*prompt, *output], len(prompt))
        expected = mask(grammars, whole)
        if begun is not None:
            grammars.follow([(begun, [*prompt, *output], len(prompt))])
            assert mask(grammars, begun) == expected
        bits = np.unpackbits(np.frombuffer(expected, np.uint8), bitorder="little")
        allowed = [token_id for token_id in np.flatnonzero(bits).tolist() if token_id != END]
        if not allowed:
            return
        output.append(rng.choice(allowed))
        if place + 1 == length:
            begun = ready(grammars.constraint(grammar, tuple(output)))
            assert not begun.error


@pytest.mark.usefixtures("no_collections")
def test_engine_thread_does_not_follow_a_long_output(grammars: Grammars) -> None:
    """At once, these tokens take seconds of the thread that asks for the next mask."""
    output = output_of("a" * 300)
    grammar = costly(300)
    ready(grammars.constraint(grammar))
    began = time.thread_time()
    constraint = grammars.constraint(grammar, output)
    constraint_s = time.thread_time() - began
    ready(constraint)
    began = time.thread_time()
    grammars.follow([(constraint, output, 0)])
    own_s = constraint_s + time.thread_time() - began
    assert not constraint.error
    at_once = ready(grammars.constraint(grammar))
    began = time.thread_time()
    at_once.follow(output, 0)
    assert own_s < (time.thread_time() - began) / 20
    assert mask(grammars, constraint) == mask(grammars, at_once)


def test_costly_token_leaves_the_interpreter_to_others(grammars: Grammars) -> None:
    rules = "".join(f'r{i}: "a"\n' for i in range(600))
    grammar = grammar_from("lark", "start: e\ne: " + " | ".join(f"r{i}" for i in range(600)) + " | e e\n" + rules)
    matcher = ready(grammars.constraint(grammar)).matcher
    [token_id] = output_of("a")
    num_beats, stopping = 0, threading.Event()

    def beat() -> None:
        nonlocal num_beats
        while not stopping.wait(0.0005):
            num_beats += 1

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        counts = []
        for _ in range(40):
            before = num_beats
            assert grammars._parallel.consume([(matcher, token_id)]) == [True]
            counts.append(num_beats - before)
    finally:
        stopping.set()
        thread.join()
    # With the interpreter lock held, a call lets at most one beat through, at its end.
    assert max(counts) > 2


def test_costly_masks_have_their_tokens_consumed_in_parallel(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    consume = grammars._parallel.consume

    def counted(matchers: Sequence[tuple[LLMatcher, int]]) -> list[bool]:
        calls.append(len(matchers))
        return consume(matchers)

    monkeypatch.setattr(grammars._parallel, "consume", counted)
    good, bad, cheap = (ready(grammars.constraint(g)) for g in (costly(400), costly(400), grammar_from("regex", "a+")))
    outputs = [output_of(text) for text in ("a", "b", "aa")]
    grammars.masks([(good, ()), (bad, ()), (cheap, ())])
    monkeypatch.setattr(grammars, "_last_masks_s", 1.0)
    grammars.follow([(c, output, 0) for c, output in zip((good, bad, cheap), outputs, strict=True)])
    assert calls == [3, 1]
    assert not good.error and bad.error and not cheap.error
    at_once = ready(grammars.constraint(grammar_from("regex", "a+")))
    at_once.follow(outputs[2], 0)
    assert mask(grammars, cheap) == mask(grammars, at_once)


def test_token_that_no_mask_would_have_allowed_ends_the_following(grammars: Grammars) -> None:
    grammar = ambiguous(200)
    ready(grammars.constraint(grammar))
    constraint = ready(grammars.constraint(grammar, output_of("a" * 200)))
    assert constraint.error
    outside = ready(grammars.constraint(grammar_from("regex", "a+"), output_of("aab")))
    assert outside.error == module.LEFT


def test_whole_following_is_bounded(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CPU_S", 0.05)
    grammar = costly(400)
    others = ready(grammars.constraint(grammar))
    assert others.matcher is not None
    constraint = ready(grammars.constraint(grammar, output_of("a" * 2000)))
    assert constraint.error == ("its 2000 tokens so far take more than 0.05 s to follow; make the grammar simpler")
    # Another attempt would take as long.
    assert not constraint.may_do_better


def test_several_outputs_advance_together(grammars: Grammars) -> None:
    slow = [grammars.constraint(costly(400), output_of("a" * 1500)) for _ in range(module.NUM_THREADS)]
    quick = ready(grammars.constraint(grammar_from("regex", "a+"), output_of("a" * 100)))
    assert not quick.error
    assert not any(constraint.is_ready for constraint in slow)


def test_nobody_follows_an_abandoned_output(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    advanced: list[bool] = []
    advance = module._Following.advance

    def noted(following: module._Following) -> bool:
        advanced.append(advance(following))
        return advanced[-1]

    monkeypatch.setattr(module._Following, "advance", noted)
    constraint = grammars.constraint(costly(400), output_of("a" * 5000))
    deadline = time.monotonic() + DEADLINE_S
    while not advanced and time.monotonic() < deadline:
        time.sleep(0.001)
    del constraint
    gc.collect()
    while advanced[-1] and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not advanced[-1]


def test_following_waits_for_the_compilation_and_shares_its_error(grammars: Grammars) -> None:
    constraint = ready(grammars.constraint(grammar_from("regex", "(a"), output_of("aa")))
    assert "unclosed group" in constraint.error


def test_following_ends_at_masks_that_cost_too_much(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MASK_CPU_S", 0.001)
    grammar = costly(500)
    other = ready(grammars.constraint(grammar))
    assert other.matcher is not None
    constraint = ready(grammars.constraint(grammar, output_of("a" * 500)))
    assert constraint.error == module.TOO_COSTLY and not constraint.may_do_better
