"""Masks of a grammar, against a check of every token."""

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, grammar_from

from tandem.engine import grammar_compilers
from tandem.engine import grammars as module
from tandem.engine.grammars import Constraint, Grammars
from tandem.router.text.grammar_check import translate
from tests.fakes.tokenizer_files import byte_level, save

# More columns than tokens, as in real models.
VOCAB_SIZE = 270
END, OTHER_END = 257, 256
SMOLLM2_SIZE = 49152


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), byte_level(), {"eos_token_id": [END]})


def grammars_of(model_dir: Path, vocab_size: int = VOCAB_SIZE) -> Grammars:
    made = Grammars.of_model(model_dir, vocab_size)
    assert made is not None
    return made


@pytest.fixture(scope="module")
def grammars(model_dir: Path) -> Grammars:
    return grammars_of(model_dir)


def ready(constraint: Constraint) -> Constraint:
    deadline = time.monotonic() + 10.0
    while not constraint.is_ready:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return constraint


def allowed(grammars: Grammars, *constraints: Constraint, end_ids: Sequence[int] = (END, OTHER_END)) -> list[set[int]]:
    masks = grammars.masks([(constraint, end_ids) for constraint in constraints])
    assert masks.shape == (len(constraints), -(-VOCAB_SIZE // 32)) and masks.dtype == np.int32
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def token_texts() -> dict[int, str]:
    tokenizer = byte_level()
    return {i: tokenizer.decode([i]) for i in range(260) if i not in (END, OTHER_END)}


TEXTS = token_texts()
IDS = {text: token_id for token_id, text in TEXTS.items()}


def output_of(text: str) -> list[int]:
    return [IDS[letter] for letter in text]


@given(options=st.lists(st.text("ab c", min_size=1, max_size=5), min_size=1, max_size=5), data=st.data())
@settings(max_examples=150, deadline=None)
def test_mask_allows_exactly_the_continuations(grammars: Grammars, options: list[str], data: st.DataObject) -> None:
    chosen = data.draw(st.sampled_from(options))
    begun = chosen[: data.draw(st.integers(0, len(chosen)))]
    constraint = ready(grammars.constraint(translate("choice", json.dumps(options))))
    prompt = [1, 2, 3]
    constraint.follow([*prompt, *output_of(begun)], len(prompt))
    expected = {i for i, text in TEXTS.items() if any(option.startswith(begun + text) for option in options)}
    if begun in options:
        expected |= {END, OTHER_END}
    assert allowed(grammars, constraint) == [expected]
    assert not constraint.error


def test_masks_do_not_depend_on_the_split_of_the_output(grammars: Grammars) -> None:
    grammar = LLMatcher.grammar_from_json_schema({"type": "array", "items": {"type": "integer"}})
    output = output_of("[12, 3")
    at_once, piece_by_piece = (ready(grammars.constraint(grammar)) for _ in range(2))
    at_once.follow(output, 0)
    for length in range(len(output) + 1):
        piece_by_piece.follow(output[:length], 0)
        allowed(grammars, piece_by_piece)
    assert allowed(grammars, at_once) == allowed(grammars, piece_by_piece) != [set()]
    at_once.follow([*output, *output_of("]")], 0)
    first, second = allowed(grammars, at_once, piece_by_piece)
    assert END in first and END not in second


def test_output_ends_only_at_the_end_of_the_grammar(grammars: Grammars) -> None:
    constraint = ready(grammars.constraint(grammar_from("regex", "a+")))
    constraint.follow(output_of("a"), 0)
    assert allowed(grammars, constraint, end_ids=(OTHER_END, IDS["b"])) == [{IDS["a"], OTHER_END, IDS["b"]}]


def test_invalid_grammar_is_an_error_and_forbids_nothing(grammars: Grammars) -> None:
    bad, good = (ready(grammars.constraint(grammar_from("regex", regex))) for regex in ("(a", "a"))
    assert "unclosed group" in bad.error and not good.error
    everything, one = allowed(grammars, bad, good)
    assert one == {IDS["a"]} and everything >= set(range(VOCAB_SIZE))


def test_too_complex_grammar_is_an_error(grammars: Grammars) -> None:
    properties = {f"p{number}": {"type": "string", "maxLength": 100} for number in range(600)}
    grammar = LLMatcher.grammar_from_json_schema({"type": "object", "properties": properties})
    constraint = ready(grammars.constraint(grammar))
    for text in ("", "{", '{"'):
        constraint.follow(output_of(text), 0)
        everything = allowed(grammars, constraint)
    assert "items" in constraint.error
    assert everything[0] >= set(range(VOCAB_SIZE))


@pytest.fixture(scope="module")
def many_tokens(smollm2_dir: Path) -> Grammars:
    return grammars_of(smollm2_dir, SMOLLM2_SIZE)


def test_limits_used_up_by_other_outputs_allow_a_retry(many_tokens: Grammars) -> None:
    """llguidance counts states over all outputs of a grammar."""
    grammar = grammar_from("regex", "(?s).*a.{200}b")
    rng = random.Random(0)

    def serve(constraint: Constraint) -> int:
        output: list[int] = []
        while len(output) < 400:
            constraint.follow(output, 0)
            bits = many_tokens.masks([(constraint, ())]).view(np.uint8)
            if constraint.error:
                break
            output.append(rng.choice(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()))
        return len(output)

    together = [ready(many_tokens.constraint(grammar)) for _ in range(2)]
    lengths = [serve(constraint) for constraint in together]
    assert lengths[1] < lengths[0], "for this test the first must use up what both have"
    assert together[1].error and together[1].may_do_better
    # Another attempt starts afresh, and alone.
    again = ready(many_tokens.constraint(grammar))
    assert serve(again) > lengths[1] and not again.may_do_better


def test_announced_requests_use_no_limits(grammars: Grammars) -> None:
    properties = {f"q{number}": {"type": "string", "maxLength": 100} for number in range(600)}
    grammar = LLMatcher.grammar_from_json_schema({"type": "object", "properties": properties})
    # A decode worker asks for a grammar at the announcement and again on arrival.
    ready(grammars.constraint(grammar))
    constraint = ready(grammars.constraint(grammar))
    constraint.follow(output_of('{"'), 0)
    allowed(grammars, constraint)
    assert constraint.error and not constraint.may_do_better


def test_no_mask_takes_long(many_tokens: Grammars) -> None:
    cpu_s = []
    for _ in range(3):
        # Compiled anew each time, because failed grammars are not kept.
        ambiguous = ready(many_tokens.constraint(grammar_from("lark", 'start: e\ne: e e | e e e | "a" | "b" | " "')))
        # Of all threads: llguidance chooses the one that makes a mask.
        began = time.process_time()
        many_tokens.masks([(ambiguous, ())])
        cpu_s.append(time.process_time() - began)
        assert "items" in ambiguous.error and len(ambiguous.error) <= 300
    # llguidance's own limits take 0.3 s to give up.
    assert min(cpu_s) < 0.1


def test_output_whose_masks_cost_too_much_ends_alone(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance's limits do not count items that it finds again."""
    ambiguous = ready(grammars.constraint(grammar_from("lark", 'start: e\ne: e e | e e e | "a"')))
    cheap = ready(grammars.constraint(grammar_from("regex", "a+")))
    other = ready(grammars.constraint(ambiguous.compiled.text))
    assert other.matcher is not None
    monkeypatch.setattr(module, "MAX_MASK_CPU_S", 0.002)
    output: list[int] = []
    while not ambiguous.error and len(output) < 250:
        output += output_of("a")
        grammars.follow([(constraint, output, 0) for constraint in (ambiguous, cheap)])
        _, expected = allowed(grammars, ambiguous, cheap)
        assert not cheap.error and expected == {IDS["a"], END, OTHER_END}
    assert ambiguous.error == module.TOO_COSTLY and not ambiguous.may_do_better


def test_the_costliest_outputs_of_a_step_end_if_all_take_too_long(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = "".join(f'r{number}: r{number} "a" | "a"\n' for number in range(300))
    start = " | ".join(f"r{number}" for number in range(300))
    heavy = [ready(grammars.constraint(grammar_from("lark", f"start: {start}\n{rules}"))) for _ in range(16)]
    cheap = ready(grammars.constraint(grammar_from("regex", "a+")))
    # A busy machine makes one mask no costlier: only together they take too long.
    monkeypatch.setattr(module, "MAX_STEP_CPU_S", 0.003)
    output: list[int] = []
    for _ in range(3):
        # Fast machines make so few masks within the time that they are not looked at one by one.
        monkeypatch.setattr(grammars, "_last_masks_s", 1.0)
        going_on = [constraint for constraint in heavy if not constraint.error]
        assert allowed(grammars, *going_on, cheap)[-1] == ({IDS["a"], END, OTHER_END} if output else {IDS["a"]})
        output += output_of("a")
        grammars.follow([(constraint, output, 0) for constraint in (*heavy, cheap) if not constraint.error])
    assert not cheap.error and {constraint.error for constraint in heavy} - {""} == {module.TOO_COSTLY_TOGETHER}


def test_output_outside_the_grammar_is_an_error(grammars: Grammars) -> None:
    constraint = ready(grammars.constraint(grammar_from("regex", "a")))
    constraint.follow(output_of("b"), 0)
    assert constraint.error


def test_grammars_are_compiled_once_and_the_last_ones_kept(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compilers, "MAX_NUM_KEPT", 3)
    grammars = grammars_of(model_dir)
    compiled: list[str] = []
    compile_one = grammars._compile
    monkeypatch.setattr(
        grammars._compilers, "_compile", lambda grammar: (compiled.append(grammar), compile_one(grammar))[1]
    )
    texts = [grammar_from("regex", f"a{{{number}}}") for number in range(1, 6)]
    for text in (*texts[:3], texts[0], texts[3], texts[0], texts[1]):
        ready(grammars.constraint(text))
    # The second was the least recently used when the fourth came.
    assert compiled == [*texts[:4], texts[1]]
    grammars.close()


def test_model_without_text_tokenizer_supports_no_grammar(tmp_path: Path) -> None:
    assert Grammars.of_model(tmp_path, VOCAB_SIZE) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert Grammars.of_model(tmp_path, VOCAB_SIZE) is None


@pytest.mark.parametrize("content", ["[]", "1", "[" * 100_000, '{"eos_token_id": "x"}', '{"eos_token_id": [[1]]}', "{"])
def test_odd_end_tokens_cost_the_grammars_at_most(model_dir: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text((model_dir / "tokenizer.json").read_text())
    (tmp_path / "generation_config.json").write_text(content)
    made = Grammars.of_model(tmp_path, VOCAB_SIZE)
    if made is not None:
        made.close()
