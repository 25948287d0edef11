"""What clients want of an output, and what workers are told."""

import asyncio
import json
import threading
import time
from typing import get_args

import pytest
from llguidance import LLMatcher

from router import structured_output
from router.structured_output import JSON_OBJECT, GrammarChecker, Kind, StructuredOutput, choices
from tandem.sampling_params import MAX_GRAMMAR_BYTES


def checked(kind: Kind, content: str) -> str:
    checker = GrammarChecker()
    try:
        return asyncio.run(checker.grammar(StructuredOutput(kind, content, "field")))
    finally:
        checker.close()


GOOD: dict[Kind, list[str]] = {
    "json_schema": [JSON_OBJECT, "true", "{}", '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}'],
    "regex": ["[a-z]+", "a|b"],
    "choice": ['["a", "\\u00e9\\n\\"b\\""]'],
    "grammar": ['start: "a" | "b"', 'root ::= "a" | "b"'],
}
BAD: dict[Kind, list[tuple[str, str]]] = {
    "json_schema": [
        ('{"type": "strin"}', "Invalid type"),
        ('{"not": {}}', "not"),
        ("[1]", "not a JSON object"),
        ("{", "not JSON"),
        ("[" * 50_000, "nested too deeply"),
        ('{"$ref": "https://example.com/schema"}', "retriev"),
    ],
    "regex": [("(a", "unclosed group")],
    "grammar": [("start: x", "unknown name"), ("", "No .root. rule")],
}


def test_every_kind_is_tried() -> None:
    assert set(GOOD) == set(get_args(Kind))


@pytest.mark.parametrize(("kind", "content"), [(kind, content) for kind, texts in GOOD.items() for content in texts])
def test_what_is_good_is_told_in_a_form_that_workers_follow(kind: Kind, content: str) -> None:
    assert LLMatcher.validate_grammar(checked(kind, content)) == ""


@pytest.mark.parametrize(("kind", "content", "why"), [(kind, *pair) for kind, pairs in BAD.items() for pair in pairs])
def test_what_is_not_is_refused_with_the_reason(kind: Kind, content: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        checked(kind, content)


def test_there_is_something_to_choose_from() -> None:
    assert json.loads(choices(["a", "b"], "field").content) == ["a", "b"]
    for outputs in ([], ["a", ""]):
        with pytest.raises(ValueError, match="at least one choice"):
            choices(outputs, "field")


def test_a_schema_of_too_many_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_GRAMMAR_BYTES} bytes"):
        checked("json_schema", json.dumps({"enum": ["é" * MAX_GRAMMAR_BYTES]}))


def test_a_schema_cannot_switch_anything_of_ours() -> None:
    grammar = checked("json_schema", json.dumps({"type": "object", "x-guidance": {"whitespace_pattern": ".*"}}))
    assert ".*" not in grammar


def test_what_was_good_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[StructuredOutput] = []
    check = structured_output._checked
    monkeypatch.setattr(structured_output, "_checked", lambda wanted: (looked_at.append(wanted), check(wanted))[1])
    monkeypatch.setattr(structured_output, "MAX_NUM_KEPT", 2)
    checker = GrammarChecker()

    async def scenario() -> None:
        for regex in ("a", "b", "a", "c", "a", "b"):
            await checker.grammar(StructuredOutput("regex", regex, "field"))

    asyncio.run(scenario())
    checker.close()
    assert [wanted.content for wanted in looked_at] == ["a", "b", "c", "b"]


def test_looking_at_a_large_one_holds_up_nobody() -> None:
    schema = {"anyOf": [{"type": "object", "properties": {f"p{i}-{j}": {}}} for i in range(40) for j in range(30)]}
    checker = GrammarChecker()
    gaps: list[float] = []

    async def scenario() -> None:
        wanted = asyncio.create_task(checker.grammar(StructuredOutput("json_schema", json.dumps(schema), "field")))
        while not wanted.done():
            began = time.monotonic()
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - began)
        await wanted

    asyncio.run(scenario())
    checker.close()
    assert len(gaps) > 2 and max(gaps) < 0.2


def test_who_waits_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "TIMEOUT_S", 0.05)
    may_go_on = threading.Event()
    monkeypatch.setattr(structured_output, "_checked", lambda wanted: str(may_go_on.wait(10.0)))
    checker = GrammarChecker()
    with pytest.raises(TimeoutError):
        asyncio.run(checker.grammar(StructuredOutput("regex", "a", "field")))
    may_go_on.set()
    checker.close()
