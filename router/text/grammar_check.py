"""Looks at one grammar, in a process of its own: there are schemas of a few hundred bytes that take llguidance minutes
and gigabytes to compile, and a thread that does it cannot be stopped.

Standard input has kind and content, standard output the grammar in the form that workers follow, or why it is none.
"""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from

from tandem.grammar_limits import LIMITS, one_line
from tandem.router.text.tool_grammar import after_reasoning, calls, either

# So much a grammar may take to compile: here, and then again at each worker that is given it.
CPU_SECONDS = 1
NUM_BYTES = 128 * 2**20
# For the process itself, on a busy machine.
TIMEOUT_S = 8.0
TOO_MUCH = "it takes too much to compile: make it smaller, or have it repeat less"
# Between two parts of JSON: on one line, or on lines of their own. A model that could go on with blanks for ever would.
WHITESPACE = r"[ ]|\n[ ]{0,24}"


def check(kind: str, content: str) -> str:
    """The grammar, in the form that workers follow. Returns when another process has found it good.

    Raises:
        ValueError: it is none, or takes too much; the message says why.
    """
    command = [sys.executable, "-m", "tandem.router.text.grammar_check"]
    try:
        done = subprocess.run(
            command, input=json.dumps([kind, content]).encode(), capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(TOO_MUCH) from error
    if done.returncode:
        # It has come to one of its limits, and cannot say so.
        raise ValueError(TOO_MUCH)
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise ValueError(answer["error"])
    grammar: str = answer["grammar"]
    return grammar


def translate(kind: str, content: str) -> str:
    """Raises ValueError."""
    match kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(_schema(content), overrides={"whitespace_pattern": WHITESPACE})
        case "grammar":
            return grammar_from("ebnf", content)
        case "choice":
            # One word of the grammar: as many rules as choices would be too many for its parser.
            words = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(content))
            return grammar_from("lark", f"start: CHOICE\nCHOICE: {words}")
        case "tool_calls":
            wanted = json.loads(content)
            functions = [(name, _schema(schema)) for name, schema in wanted["functions"]]
            lark = calls(wanted["parser"], functions, may_be_several=wanted["may_be_several"], whitespace=WHITESPACE)
            return grammar_from("lark", lark)
        case "after_reasoning":
            is_open, inner_kind, inner_content = json.loads(content)
            return after_reasoning(translate(inner_kind, inner_content), is_open=is_open)
        case "either":
            return either(*(translate(*inner) for inner in json.loads(content)))
        case _:
            return grammar_from("regex", content)


def culprit(kind: str, content: str) -> str:
    """Which function's schema is wrong with a grammar that is, and why; "" if it is not that of a function."""
    match kind:
        case "after_reasoning":
            return culprit(*json.loads(content)[1:])
        case "either":
            return next((why for inner in json.loads(content) if (why := culprit(*inner))), "")
        case "tool_calls":
            for name, schema in json.loads(content)["functions"]:
                if error := _matcher(translate("json_schema", schema)).get_error():
                    return f"the parameters of {name}: {error}"
    return ""


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except RecursionError as error:
        raise ValueError("the schema is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"the schema is not JSON: {error}") from error
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError("the schema is not a JSON object")
    # This is a switch of llguidance's own, for which there is no use here.
    schema.pop("x-guidance", None)
    return schema


class _Bytes:
    """A tokenizer whose tokens are bytes. A grammar takes as long to compile for it as for any other."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")
    special_token_ids = (eos_token_id,)

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def _matcher(grammar: str) -> LLMatcher:
    return LLMatcher(LLTokenizer(TokenizerWrapper(_Bytes())), grammar, log_level=0, limits=LIMITS)


def main() -> None:
    kind, content = json.loads(sys.stdin.buffer.read())
    num_own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (num_own + NUM_BYTES, num_own + NUM_BYTES))
    own = resource.getrusage(resource.RUSAGE_SELF)
    num_seconds = int(own.ru_utime + own.ru_stime) + 1 + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (num_seconds, num_seconds))
    # No memory of a process that has come to its limits is worth a file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        grammar = translate(kind, content)
        # Whether it is right is not all: what a worker does with it has to come to an end here too.
        matcher = _matcher(grammar)
        matcher.compute_bitmask()
        if matcher.is_error():
            answer = {"error": one_line(culprit(kind, content) or matcher.get_error())}
        else:
            answer = {"grammar": grammar}
    except ValueError as error:
        answer = {"error": one_line(str(error))}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
