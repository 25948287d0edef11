"""What an output is to keep to, as clients say it, made into the form that workers follow (engine/grammars.py)."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

from tandem.router.errors import InvalidRequestError
from tandem.router.text import grammar_check
from tandem.sampling_params import MAX_GRAMMAR_BYTES

Kind = Literal["json_schema", "regex", "choice", "grammar", "tool_calls", "either", "after_reasoning"]

JSON_OBJECT = json.dumps({"type": "object"})
# So long a grammar waits for its turn and for the answer.
TIMEOUT_S = 20.0
# So many are looked at side by side.
NUM_THREADS = 4
# Those that have been found good.
MAX_NUM_KEPT = 256


class StructuredOutput(NamedTuple):
    """
    Attributes:
        content: a JSON schema; a regular expression, in the syntax of Rust's regex; the outputs to choose from, as a
            JSON list of strings; a context-free grammar, in Lark's syntax or GBNF; or what `tool_calls`,
            `either` and `after_reasoning` make.
        param: the client's own field, for errors.
    """

    kind: Kind
    content: str
    param: str


class GrammarChecker:
    """Tells good grammars from others, in processes of their own (router/text/grammar_check.py)."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammar")
        # By kind and content.
        self._good: OrderedDict[tuple[Kind, str], str] = OrderedDict()

    async def grammar(self, wanted: StructuredOutput) -> str:
        """For SamplingParams.grammar.

        Raises:
            ValueError: it is none, or cannot be kept to; the message says why.
            TimeoutError: too many wait.
        """
        key = wanted.kind, wanted.content
        grammar = self._good.get(key)
        if grammar is None:
            _check_size(wanted.content)
            async with asyncio.timeout(TIMEOUT_S):
                grammar = await asyncio.get_running_loop().run_in_executor(self._threads, grammar_check.check, *key)
            _check_size(grammar)
            self._good[key] = grammar
            if len(self._good) > MAX_NUM_KEPT:
                self._good.popitem(last=False)
        self._good.move_to_end(key)
        return grammar

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _check_size(text: str) -> None:
    """Raises ValueError."""
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"at most {MAX_GRAMMAR_BYTES} bytes are taken")


def choices(outputs: Sequence[str], param: str) -> StructuredOutput:
    """One of these texts. Raises InvalidRequestError."""
    if not outputs or not all(outputs):
        raise InvalidRequestError(f"{param} needs at least one choice, and none may be empty", param)
    return StructuredOutput("choice", json.dumps(list(outputs), ensure_ascii=False), param)


def tool_calls(
    parser: str, functions: Sequence[tuple[str, str]], *, may_be_several: bool, param: str
) -> StructuredOutput:
    """Calls of functions, one at least. Args: parser: one of tandem.router.text.tool_grammar.CALL_STYLES; functions:
    names, and the
    schemas of their arguments as JSON."""
    content = {"parser": parser, "functions": functions, "may_be_several": may_be_several}
    return StructuredOutput("tool_calls", json.dumps(content), param)


def either(calls: StructuredOutput, answer: StructuredOutput) -> StructuredOutput:
    """Calls, or else an answer that keeps to something."""
    content = [[wanted.kind, wanted.content] for wanted in (calls, answer)]
    return StructuredOutput("either", json.dumps(content), answer.param)


def after_reasoning(wanted: StructuredOutput, *, is_open: bool) -> StructuredOutput:
    """The same behind a model's reasoning. Args: is_open: the reasoning has not begun, and need not."""
    return StructuredOutput("after_reasoning", json.dumps([is_open, wanted.kind, wanted.content]), wanted.param)
