"""Masks behind drafts, against those of a matcher that consumes the drafts as output."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher

from tandem.engine import grammar_drafts
from tandem.engine.grammar_drafts import DraftMatcher
from tandem.engine.grammars import Constraint, Grammars
from tests.fakes.tokenizer_files import byte_level, save
from tests.unit.engine.test_grammars import END, OTHER_END, SMOLLM2_SIZE, VOCAB_SIZE, output_of

ENDS = (OTHER_END,)
WORDS = LLMatcher.grammar_from_regex("(ab|cd)+")
TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def any_host() -> Iterator[None]:
    """Checks take the time that a slow host needs, except where a test limits it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_drafts, "MAX_CPU_S", 60.0)
        yield


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    model_dir: Path = save(tmp_path_factory.mktemp("model"), byte_level(), {"eos_token_id": [END]})
    made = Grammars.of_model(model_dir, VOCAB_SIZE)
    assert made is not None
    return made


def ready(grammars: Grammars, grammar: str) -> tuple[Constraint, DraftMatcher]:
    """Returns a request's matcher and that of its drafts, both compiled."""
    constraint, drafts = grammars.constraint(grammar), grammars.draft_matcher(grammar)
    deadline = time.monotonic() + TIMEOUT_S
    while not (constraint.is_ready and drafts._compiled.matcher.done()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return constraint, drafts


def test_masks_are_those_of_a_matcher_that_follows(grammars: Grammars) -> None:
    constraint, drafts = ready(grammars, WORDS)
    for output, draft, num_passing in (("", "abcdab", 6), ("ab", "cda", 3), ("abcda", "bac", 2), ("abcdab", "x", 0)):
        masks = drafts.check(output_of(output), output_of(draft), ENDS)
        assert len(masks) == num_passing
        for number, mask in enumerate(masks, 1):
            follower, _ = ready(grammars, WORDS)
            follower.follow(output_of(output + draft[:number]), 0)
            assert np.array_equal(mask, grammars.masks([(follower, ENDS)])[0])
    # The request's own matcher has seen nothing of it.
    constraint.follow(output_of("abcdab"), 0)
    grammars.masks([(constraint, ENDS)])
    assert not constraint.error and not drafts.has_failed


def test_a_draft_that_leaves_nothing_to_follow_does_not_pass(grammars: Grammars) -> None:
    _, drafts = ready(grammars, LLMatcher.grammar_from_regex("ab"))
    # Nothing but an end may follow the second.
    assert len(drafts.check([], output_of("ab"), ENDS)) == 2
    assert len(drafts.check([], output_of("ab"), ())) == 1


def test_a_costly_output_is_followed_over_several_steps(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    _, drafts = ready(grammars, WORDS)
    output = output_of("abcd")
    monkeypatch.setattr(grammar_drafts, "MAX_CPU_S", 0.0)
    for _ in output[:-1]:
        assert drafts.check(output, output_of("ab"), ENDS) == []
    monkeypatch.undo()
    assert len(drafts.check(output, output_of("ab"), ENDS)) == 2 and not drafts.has_failed


def test_limits_used_up_by_other_outputs_end_no_later_drafts(smollm2_dir: Path) -> None:
    """llguidance counts states over all outputs of a grammar."""
    grammars = Grammars.of_model(smollm2_dir, SMOLLM2_SIZE)
    assert grammars is not None
    grammar, rng = LLMatcher.grammar_from_regex("(?s).*a.{200}b"), random.Random(0)

    def num_passed(drafts: DraftMatcher) -> int:
        output: list[int] = []
        for _ in range(100):
            draft = rng.randrange(100, 10_000)
            for mask in drafts.check(output, [draft], ()):
                output += [draft, rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")))]
        return len(output) // 2

    _, first = ready(grammars, grammar)
    assert 5 < num_passed(first) < 100 and first.has_failed
    # Its request is of another compiled grammar.
    constraint, later = ready(grammars, grammar)
    assert num_passed(later) > 5 and not constraint.error
    grammars.close()


def test_failure_ends_drafting_and_not_the_request(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    left, drafts_of_left = ready(grammars, WORDS)
    assert drafts_of_left.check(output_of("ax"), output_of("ab"), ENDS) == [] and drafts_of_left.has_failed
    constraint, drafts = ready(grammars, WORDS)
    monkeypatch.setattr(grammar_drafts, "MAX_CPU_S", 0.0)
    # A slow check is excused once.
    assert len(drafts.check([], output_of("ab"), ENDS)) == 1 and not drafts.has_failed
    drafts.check([], output_of("ab"), ENDS)
    assert drafts.has_failed and drafts.check([], output_of("ab"), ENDS) == []
    bad = grammars.draft_matcher("start: missing")
    deadline = time.monotonic() + TIMEOUT_S
    while not bad.has_failed:
        assert bad.check([], [1], ENDS) == [] and time.monotonic() < deadline
    for one in (left, constraint):
        one.follow(output_of("ab"), 0)
        grammars.masks([(one, ENDS)])
        assert not one.error
