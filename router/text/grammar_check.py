"""Checks one grammar in a separate process with limits: a schema of a few hundred bytes can take llguidance minutes and
gigabytes.

Standard input has kind, content and whether objects are closed; standard output has the grammar for the workers or the
error.
"""

import json
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from

from tandem.grammar_limits import LIMITS, one_line
from tandem.router.text.closed_objects import close_objects
from tandem.router.text.tool_grammar import after_reasoning, calls, either

# For compiling a grammar, here and again at each worker.
CPU_SECONDS = 1.0
NUM_BYTES = 128 * 2**20
# For the whole process on a busy machine.
TIMEOUT_S = 8.0
TOO_MUCH = "it takes too much time or memory to compile: make it smaller, or let it repeat less"
# Bounded because a model could otherwise emit blanks for ever.
WHITESPACE = r"[ ]|\n[ ]{0,24}"


class GrammarCheck:
    """One check. It may be cancelled from another thread than the one that runs it."""

    def __init__(self, kind: str, content: str, *, closes_objects: bool = True) -> None:
        """Args: closes_objects: objects of schemas take no other properties than theirs, unless they say so."""
        self.kind = kind
        self.content = content
        self._closes_objects = closes_objects
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_cancelled = False

    def run(self) -> str:
        """Returns the grammar for the workers. Raises ValueError if it is invalid or too costly, or the check was
        cancelled."""
        command = [sys.executable, "-m", "tandem.router.text.grammar_check"]
        asked = json.dumps([self.kind, self.content, self._closes_objects])
        with self._lock:
            if self._is_cancelled:
                raise ValueError(TOO_MUCH)
            process = self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        with process:
            try:
                output, _ = process.communicate(asked.encode(), TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise ValueError(TOO_MUCH) from error
        if process.returncode:
            # The process hit a limit and cannot report it.
            raise ValueError(TOO_MUCH)
        answer = json.loads(output)
        if "error" in answer:
            raise ValueError(answer["error"])
        grammar: str = answer["grammar"]
        return grammar

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._process is not None:
                self._process.kill()


def translate(kind: str, content: str, closes_objects: bool = True) -> str:
    match kind:
        case "json_schema":
            schema = _schema(content, closes_objects)
            return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})
        case "grammar":
            return grammar_from("ebnf", content)
        case "choice":
            # One rule for each choice is too much for the parser.
            words = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(content))
            return grammar_from("lark", f"start: CHOICE\nCHOICE: {words}")
        case "tool_calls":
            wanted = json.loads(content)
            functions = [(name, _schema(schema, closes_objects)) for name, schema in wanted["functions"]]
            lark = calls(wanted["parser"], functions, may_be_several=wanted["may_be_several"], whitespace=WHITESPACE)
            return grammar_from("lark", lark)
        case "after_reasoning":
            is_open, inner_kind, inner_content = json.loads(content)
            return after_reasoning(translate(inner_kind, inner_content, closes_objects), is_open=is_open)
        case "either":
            calls_part, answer_part = (translate(name, part, closes_objects) for name, part in json.loads(content))
            return either(calls_part, answer_part)
        case _:
            return grammar_from("regex", content)


def culprit(kind: str, content: str, closes_objects: bool) -> str:
    """Returns the function whose schema is wrong, with the error, or ""."""
    match kind:
        case "after_reasoning":
            _, inner_kind, inner_content = json.loads(content)
            return culprit(inner_kind, inner_content, closes_objects)
        case "either":
            found = (culprit(name, part, closes_objects) for name, part in json.loads(content))
            return next(filter(None, found), "")
        case "tool_calls":
            for name, schema in json.loads(content)["functions"]:
                if error := _matcher(translate("json_schema", schema, closes_objects)).get_error():
                    return f"the parameters of {name}: {error}"
    return ""


def _schema(text: str, closes_objects: bool) -> dict[str, Any]:
    try:
        schema = json.loads(text)
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise ValueError("the schema is not a JSON object")
        schema.pop("x-guidance", None)
        return close_objects(schema) if closes_objects else schema
    except RecursionError as error:
        raise ValueError("the schema is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"the schema is not JSON: {error}") from error


class _Bytes:
    """Tokens are bytes: compile time does not depend on the tokenizer."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")
    special_token_ids = (eos_token_id,)

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def _matcher(grammar: str) -> LLMatcher:
    return LLMatcher(LLTokenizer(TokenizerWrapper(_Bytes())), grammar, log_level=0, limits=LIMITS)


def main() -> None:
    kind, content, closes_objects = json.loads(sys.stdin.buffer.read())
    num_own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (num_own + NUM_BYTES, num_own + NUM_BYTES))
    # Its signal ends the process. RLIMIT_CPU has whole seconds only.
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        grammar = translate(kind, content, closes_objects)
        # The first mask shows the cost at a worker.
        matcher = _matcher(grammar)
        matcher.compute_bitmask()
        if matcher.is_error():
            answer = {"error": one_line(culprit(kind, content, closes_objects) or matcher.get_error())}
        else:
            answer = {"grammar": grammar}
    except ValueError as error:
        answer = {"error": one_line(str(error))}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
