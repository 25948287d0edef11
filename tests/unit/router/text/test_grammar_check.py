import json
import resource
import signal
import threading
import time
from typing import get_args

import pytest
from llguidance import LLMatcher

from tandem.router.text.grammar_check import CPU_SECONDS, TIMEOUT_S, TOO_MUCH, GrammarCheck
from tandem.router.text.structured_output import JSON_OBJECT, Kind


def check(kind: str, content: str) -> str:
    return GrammarCheck(kind, content).run()


def calls_of(parser: str, schema: str) -> str:
    return json.dumps({"parser": parser, "functions": [["f", schema]], "may_be_several": True})


GOOD: dict[Kind, list[str]] = {
    "json_schema": [JSON_OBJECT, "true", "{}", '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}'],
    "regex": ["[a-z]+", "a|b"],
    "choice": ['["a", "\\u00e9\\n\\"b\\""]'],
    "grammar": ['start: "a" | "b"', 'root ::= "a" | "b"'],
    "tool_calls": [calls_of("hermes", "{}"), calls_of("json", '{"type": "object"}')],
    "either": [json.dumps([["tool_calls", calls_of("hermes", "{}")], ["regex", "a"]])],
    "after_reasoning": [json.dumps([False, "regex", "a"]), json.dumps([True, "json_schema", "{}"])],
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
    "tool_calls": [
        (calls_of("hermes", '{"type": "strin"}'), "the parameters of f: Invalid type"),
        (calls_of("hermes", "{"), "not JSON"),
    ],
    "after_reasoning": [
        (json.dumps([True, "regex", "(a"]), "unclosed group"),
        (
            json.dumps([False, "either", json.dumps([["tool_calls", calls_of("json", '{"not": 1}')], ["regex", "a"]])]),
            "the parameters of f: Unimplemented keys",
        ),
    ],
}


def test_every_kind() -> None:
    assert set(GOOD) == set(get_args(Kind))


@pytest.mark.parametrize(("kind", "content"), [(kind, content) for kind, texts in GOOD.items() for content in texts])
def test_valid_grammars_compile(kind: Kind, content: str) -> None:
    assert LLMatcher.validate_grammar(check(kind, content)) == ""


@pytest.mark.parametrize(("kind", "content", "why"), [(kind, *pair) for kind, pairs in BAD.items() for pair in pairs])
def test_invalid_grammars_are_refused(kind: Kind, content: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check(kind, content)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "string", "pattern": f".*a.{{{number}}}"} for number in range(5, 30)]},
        {"type": "integer", "multipleOf": 9999991},
    ],
)
def test_slow_schema_is_refused_in_seconds(schema: dict[str, object]) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=TOO_MUCH):
        check("json_schema", json.dumps(schema))
    assert time.monotonic() - began < TIMEOUT_S + 4.0


def test_a_check_is_bounded_in_cpu_time() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(ValueError, match=TOO_MUCH):
        check("json_schema", '{"type": "integer", "multipleOf": 9999991}')
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # The start of the process takes the rest.
    assert used_s < CPU_SECONDS + 0.9


def test_a_cancelled_check_ends_its_process() -> None:
    slow = GrammarCheck("json_schema", '{"type": "integer", "multipleOf": 9999991}')
    failures: list[str] = []

    def run() -> None:
        try:
            slow.run()
        except ValueError as error:
            failures.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    while slow._process is None:
        time.sleep(0.001)
    slow.cancel()
    thread.join(10.0)
    assert failures == [TOO_MUCH] and slow._process.returncode == -signal.SIGKILL
    with pytest.raises(ValueError, match=TOO_MUCH):
        slow.run()


def test_many_choices() -> None:
    check("choice", json.dumps([f"choice {number}" for number in range(2500)]))


def test_schema_cannot_set_options() -> None:
    grammar = check("json_schema", json.dumps({"type": "object", "x-guidance": {"whitespace_pattern": ".*"}}))
    assert ".*" not in grammar
