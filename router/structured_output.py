"""What an output is to keep to, as clients say it, made into the form that workers follow (engine/grammars.py)."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

from llguidance import LLMatcher, grammar_from

from tandem.sampling_params import MAX_GRAMMAR_BYTES

Kind = Literal["json_schema", "regex", "choice", "grammar"]

JSON_OBJECT = json.dumps({"type": "object"})
# Between two parts of JSON: on one line, or on lines of their own. A model that could go on with blanks for ever would.
WHITESPACE = r"[ ]|\n[ ]{0,24}"
# Compiling takes a tenth of a second at most, by llguidance's own limits; so long a grammar waits for its turn.
TIMEOUT_S = 10.0
NUM_THREADS = 2
# Those that have been found good.
MAX_NUM_KEPT = 256


class StructuredOutput(NamedTuple):
    """
    Attributes:
        content: a JSON schema; a regular expression, in the syntax of Rust's regex; the outputs to choose from, as a
            JSON list of strings; or a context-free grammar, in Lark's syntax or GBNF.
        param: the client's own field, for errors.
    """

    kind: Kind
    content: str
    param: str


class GrammarChecker:
    """Tells good grammars from others, on threads of its own, with the interpreter's lock released."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammar")
        self._good: OrderedDict[StructuredOutput, str] = OrderedDict()

    async def grammar(self, wanted: StructuredOutput) -> str:
        """For SamplingParams.grammar.

        Raises:
            ValueError: it is none, or cannot be kept to; the message says why.
            TimeoutError: too many wait.
        """
        grammar = self._good.get(wanted)
        if grammar is None:
            if len(wanted.content.encode()) > MAX_GRAMMAR_BYTES:
                raise ValueError(f"at most {MAX_GRAMMAR_BYTES} bytes are taken")
            async with asyncio.timeout(TIMEOUT_S):
                grammar = await asyncio.get_running_loop().run_in_executor(self._threads, _checked, wanted)
            self._good[wanted] = grammar
            if len(self._good) > MAX_NUM_KEPT:
                self._good.popitem(last=False)
        self._good.move_to_end(wanted)
        return grammar

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def choices(outputs: Sequence[str], param: str) -> StructuredOutput:
    """One of these texts. Raises ValueError."""
    if not outputs or not all(outputs):
        raise ValueError("needs at least one choice, and none may be empty")
    return StructuredOutput("choice", json.dumps(list(outputs), ensure_ascii=False), param)


def _checked(wanted: StructuredOutput) -> str:
    grammar = _translated(wanted)
    if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"at most {MAX_GRAMMAR_BYTES} bytes are taken")
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise ValueError(messages[0])
    return grammar


def _translated(wanted: StructuredOutput) -> str:
    match wanted.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(
                _schema(wanted.content), overrides={"whitespace_pattern": WHITESPACE}
            )
        case "grammar":
            return grammar_from("ebnf", wanted.content)
        case _:
            return grammar_from(wanted.kind, wanted.content)


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the schema is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("the schema is nested too deeply") from error
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError("the schema is not a JSON object")
    # This is a switch of llguidance's own, for which there is no use here.
    schema.pop("x-guidance", None)
    return schema
