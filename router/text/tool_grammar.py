"""Grammars for outputs with function calls or reasoning, in llguidance's Lark."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

# So that a weak model also ends.
MAX_CALLS = 128


class CallStyle(NamedTuple):
    """
    Attributes:
        arguments: key of the arguments.
        opening, closing: text around each call.
        between: text between two calls.
        first, last: text around all calls, if there may be several.
    """

    arguments: str
    opening: str = ""
    closing: str = ""
    between: str = ""
    first: str = ""
    last: str = ""


# By name of the matching tool parser.
CALL_STYLES = {
    "hermes": CallStyle("arguments", "<tool_call>\n", "\n</tool_call>", "\n"),
    "llama3_json": CallStyle("parameters", between="; "),
    "json": CallStyle("arguments", between=", ", first="[", last="]"),
}


def calls(
    parser: str, functions: Sequence[tuple[str, dict[str, Any]]], *, may_be_several: bool, whitespace: str
) -> str:
    """Returns the grammar of one or more calls.

    Args:
        parser: a name in CALL_STYLES.
        whitespace: regular expression for whitespace between JSON parts.
    """
    style = CALL_STYLES[parser]
    lines = []
    if may_be_several:
        repeated = f"({json.dumps(style.between)} call){{0,{MAX_CALLS - 1}}}"
        lines.append(f"start: {_literal(style.first)} call {repeated} {_literal(style.last)}")
    else:
        lines.append("start: call")
    lines.append(f"call: {_literal(style.opening)} object {_literal(style.closing)}")
    lines.append("object: " + " | ".join(f"object_{i}" for i in range(len(functions))))
    for i, (name, schema) in enumerate(functions):
        beginning = f'{{"name": {json.dumps(name)}, "{style.arguments}": '
        lines.append(f'object_{i}: {json.dumps(beginning)} arguments_{i} "}}"')
        # A separate document, so that its references resolve within it.
        own = {**schema, "x-guidance": {"whitespace_pattern": whitespace}}
        lines.append(f"arguments_{i}: %json {json.dumps(own)}")
    return "\n".join(lines)


def after_reasoning(grammar: str, *, is_open: bool) -> str:
    """
    Args:
        grammar: in llguidance's form.
        is_open: True if the reasoning has not begun and is optional.
    """
    reasoning = "(OPENING reasoning)?" if is_open else "reasoning"
    outer = f"""start: {reasoning} SPACE @after
reasoning[suffix="</think>"]: /(?s:.*)/
OPENING: /\\s{{0,8}}<think>/
SPACE: /\\s{{0,8}}/
"""
    first, *others = _parts(grammar)
    return json.dumps({"grammars": [{"lark_grammar": outer}, {**first, "name": "after"}, *others]})


def either(calls_grammar: str, answer_grammar: str) -> str:
    """Each argument has one part."""
    parts = [
        {**_parts(grammar)[0], "name": name} for grammar, name in ((calls_grammar, "calls"), (answer_grammar, "answer"))
    ]
    return json.dumps({"grammars": [{"lark_grammar": "start: @calls | @answer"}, *parts]})


def _parts(grammar: str) -> list[dict[str, Any]]:
    """Returns a grammar's parts: Lark, or JSON with a list of grammars that starts with the whole."""
    if not grammar.startswith("{"):
        return [{"lark_grammar": grammar}]
    parts: list[dict[str, Any]] = json.loads(grammar)["grammars"]
    return parts


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""
