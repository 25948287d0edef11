"""Clients' constraints on outputs, as grammars for the workers."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

from tandem.router.errors import InvalidRequestError
from tandem.router.fair_slots import FairSlots
from tandem.router.text.grammar_check import GrammarCheck
from tandem.sampling_params import MAX_GRAMMAR_BYTES

Kind = Literal["json_schema", "regex", "choice", "grammar", "tool_calls", "either", "after_reasoning"]

# Of a client's constraint. In the workers' format it is longer: each closed object says so.
MAX_BYTES = 2**16
JSON_OBJECT = json.dumps({"type": "object"})
# For a grammar's wait and check.
TIMEOUT_S = 20.0
NUM_THREADS = 4
# Another client finds a thread at once. The workers compile as many at a time.
MAX_PER_CLIENT = 2
MAX_NUM_KEPT = 256


class StructuredOutput(NamedTuple):
    """
    Attributes:
        content: a JSON schema; a regular expression in Rust's syntax; choices as a JSON list of strings; a grammar in
            Lark or GBNF; or the result of `tool_calls`, `either` or `after_reasoning`.
        param: the client's field, for errors.
    """

    kind: Kind
    content: str
    param: str


class GrammarChecker:
    def __init__(self, *, closes_objects: bool = True) -> None:
        """Args: closes_objects: as for `GrammarCheck`."""
        self._closes_objects = closes_objects
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammar")
        self._slots = FairSlots(NUM_THREADS, MAX_PER_CLIENT)
        self._good: OrderedDict[tuple[Kind, str], str] = OrderedDict()

    async def grammar(self, wanted: StructuredOutput, client: str = "") -> str:
        """Returns the value of SamplingParams.grammar. Cancelling it ends the check.

        Args:
            client: takes turns with other clients.

        Raises ValueError for an invalid or costly grammar, TimeoutError if too many wait.
        """
        key = wanted.kind, wanted.content
        grammar = self._good.get(key)
        if grammar is None:
            _check_size(wanted.content, MAX_BYTES)
            async with asyncio.timeout(TIMEOUT_S), self._slots.hold(client):
                # The client's request before this one may have had the same grammar.
                grammar = self._good.get(key) or await self._checked(*key)
            _check_size(grammar, MAX_GRAMMAR_BYTES)
            self._good[key] = grammar
            if len(self._good) > MAX_NUM_KEPT:
                self._good.popitem(last=False)
        self._good.move_to_end(key)
        return grammar

    async def _checked(self, kind: Kind, content: str) -> str:
        check = GrammarCheck(kind, content, closes_objects=self._closes_objects)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, check.run)
        except asyncio.CancelledError:
            check.cancel()
            raise

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _check_size(text: str, limit: int) -> None:
    if len(text.encode()) > limit:
        raise ValueError(f"at most {limit} bytes are taken")


def choices(outputs: Sequence[str], param: str) -> StructuredOutput:
    """Raises InvalidRequestError without a choice, or for an empty one."""
    if not outputs or not all(outputs):
        raise InvalidRequestError(f"{param} needs at least one choice, and none may be empty", param)
    return StructuredOutput("choice", json.dumps(list(outputs), ensure_ascii=False), param)


def tool_calls(
    parser: str, functions: Sequence[tuple[str, str]], *, may_be_several: bool, param: str
) -> StructuredOutput:
    """
    Args:
        parser: a name in tandem.router.text.tool_grammar.CALL_STYLES.
        functions: names and argument schemas as JSON.
    """
    content = {"parser": parser, "functions": functions, "may_be_several": may_be_several}
    return StructuredOutput("tool_calls", json.dumps(content), param)


def either(calls: StructuredOutput, answer: StructuredOutput) -> StructuredOutput:
    content = [[wanted.kind, wanted.content] for wanted in (calls, answer)]
    return StructuredOutput("either", json.dumps(content), answer.param)


def after_reasoning(wanted: StructuredOutput, *, is_open: bool) -> StructuredOutput:
    """Args: is_open: True if the reasoning has not begun and is optional."""
    return StructuredOutput("after_reasoning", json.dumps([is_open, wanted.kind, wanted.content]), wanted.param)
