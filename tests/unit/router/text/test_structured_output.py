import asyncio
import json
import threading
import time

import pytest

from tandem.router.text import structured_output
from tandem.router.text.grammar_check import GrammarCheck
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
    monkeypatch.setattr(GrammarCheck, "run", lambda self: (looked_at.append(self.content), self.content)[1])
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
    monkeypatch.setattr(GrammarCheck, "run", lambda self: str(may_go_on.wait(10.0)))
    checker = GrammarChecker()
    with pytest.raises(TimeoutError):
        asyncio.run(checker.grammar(StructuredOutput("regex", "a", "field")))
    may_go_on.set()
    checker.close()


class HeldChecks:
    """Checks that end when they are let go, or cancelled. Attributes: begun, cancelled: their contents, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.may_end = threading.Event()
        monkeypatch.setattr(GrammarCheck, "run", lambda check: self._run(check))
        monkeypatch.setattr(GrammarCheck, "cancel", lambda check: self.cancelled.append(check.content))

    def _run(self, check: GrammarCheck) -> str:
        self.begun.append(check.content)
        while not self.may_end.wait(0.001):
            if check.content in self.cancelled:
                raise ValueError("cancelled")
        return check.content

    async def wait_begun(self, content: str) -> None:
        async with asyncio.timeout(10.0):
            while content not in self.begun:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


def ask(checker: GrammarChecker, client: str, content: str) -> "asyncio.Task[str]":
    return asyncio.create_task(checker.grammar(StructuredOutput("regex", content, "field"), client))


def test_one_clients_costly_grammars_do_not_hold_up_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, checker = HeldChecks(monkeypatch), GrammarChecker()

    async def scenario() -> None:
        costly = [ask(checker, "first", f"costly{number}") for number in range(64)]
        await checks.wait_begun("costly1")
        # It begins while all of the first client's go on.
        other = ask(checker, "second", "[0-9]+")
        await checks.wait_begun("[0-9]+")
        assert checks.begun == ["costly0", "costly1", "[0-9]+"]
        checks.may_end.set()
        await asyncio.gather(*costly, other)

    asyncio.run(scenario())
    checker.close()


def test_nobody_waits_for_a_cancelled_check(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, checker = HeldChecks(monkeypatch), GrammarChecker()

    async def scenario() -> None:
        left = [ask(checker, "first", f"left{number}") for number in range(8)]
        await checks.wait_begun("left1")
        for task in left:
            task.cancel()
        stays = ask(checker, "first", "stays")
        await checks.wait_begun("stays")
        # The waiting ones never begin; the running ones are ended.
        assert set(checks.begun) == {"left0", "left1", "stays"}
        assert set(checks.cancelled) == {"left0", "left1"}
        checks.may_end.set()
        await stays

    asyncio.run(scenario())
    checker.close()


def test_a_grammar_is_checked_once_for_all_requests_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, checker = HeldChecks(monkeypatch), GrammarChecker()

    async def scenario() -> None:
        same = [ask(checker, "first", "same") for _ in range(50)]
        await checks.wait_begun("same")
        checks.may_end.set()
        assert await asyncio.gather(*same) == ["same"] * 50

    asyncio.run(scenario())
    checker.close()
    assert len(checks.begun) <= structured_output.MAX_PER_CLIENT


def test_the_server_may_leave_objects_open() -> None:
    schema = StructuredOutput("json_schema", '{"type": "object", "properties": {}}', "field")
    grammars = []
    for closes_objects in (True, False):
        checker = GrammarChecker(closes_objects=closes_objects)
        grammars.append(asyncio.run(checker.grammar(schema)))
        checker.close()
    assert ["additionalProperties" in grammar for grammar in grammars] == [True, False]
