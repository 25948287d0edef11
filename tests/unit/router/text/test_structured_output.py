import asyncio
import json
import threading
import time

import pytest

from tandem.router.text import grammar_check, structured_output
from tandem.router.text.structured_output import MAX_BYTES, GrammarChecker, Kind, StructuredOutput, choices


def checked(kind: Kind, content: str) -> str:
    checker = GrammarChecker()
    try:
        return asyncio.run(checker.grammar(StructuredOutput(kind, content, "field")))
    finally:
        checker.close()


def test_choices_must_not_be_empty() -> None:
    assert json.loads(choices(["a", "b"], "field").content) == ["a", "b"]
    for outputs in ([], ["a", ""]):
        with pytest.raises(ValueError, match="at least one choice"):
            choices(outputs, "field")


def test_large_schema_is_refused() -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_BYTES} bytes"):
        checked("json_schema", json.dumps({"enum": ["é" * MAX_BYTES]}))


def test_valid_grammar_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []
    monkeypatch.setattr(grammar_check, "check", lambda kind, content, closes: (looked_at.append(content), content)[1])
    monkeypatch.setattr(structured_output, "MAX_NUM_KEPT", 2)
    checker = GrammarChecker()

    async def scenario() -> None:
        for regex in ("a", "b", "a", "c", "a", "b"):
            await checker.grammar(StructuredOutput("regex", regex, "field"))

    asyncio.run(scenario())
    checker.close()
    assert looked_at == ["a", "b", "c", "b"]


def test_check_does_not_block() -> None:
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


def test_check_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "TIMEOUT_S", 0.05)
    may_go_on = threading.Event()
    monkeypatch.setattr(grammar_check, "check", lambda kind, content, closes: str(may_go_on.wait(10.0)))
    checker = GrammarChecker()
    with pytest.raises(TimeoutError):
        asyncio.run(checker.grammar(StructuredOutput("regex", "a", "field")))
    may_go_on.set()
    checker.close()


def test_the_server_may_leave_objects_open() -> None:
    schema = StructuredOutput("json_schema", '{"type": "object", "properties": {}}', "field")
    grammars = []
    for closes_objects in (True, False):
        checker = GrammarChecker(closes_objects=closes_objects)
        grammars.append(asyncio.run(checker.grammar(schema)))
        checker.close()
    assert ["additionalProperties" in grammar for grammar in grammars] == [True, False]
