"""Namespaces of tools: one flat list of functions for the chat, and the client's names for its calls."""

from collections.abc import Sequence
from typing import Any

from tandem.router.errors import InvalidRequestError
from tandem.router.frontends.responses.schema import FunctionTool, NamespaceTool, ResponseTool

SEPARATOR = "__"


def flat_name(namespace: str | None, name: str) -> str:
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


def flat_functions(tools: Sequence[ResponseTool]) -> list[dict[str, Any]]:
    """Returns a chat's functions. A namespace's description precedes those of its functions."""
    found = []
    for tool in tools:
        if isinstance(tool, FunctionTool):
            found.append(tool.definition)
        elif isinstance(tool, NamespaceTool):
            for inner in tool.tools:
                texts = [text for text in (tool.description, inner.definition["description"]) if text]
                name = flat_name(tool.name, inner.name)
                found.append({**inner.definition, "name": name, "description": "\n".join(texts) or None})
    return found


def called_names(tools: Sequence[ResponseTool] | None) -> dict[str, dict[str, str]]:
    """Returns the client's `name` and `namespace` of each function in a namespace, by its name in the chat."""
    return {
        flat_name(tool.name, inner.name): {"name": inner.name, "namespace": tool.name}
        for tool in tools or ()
        if isinstance(tool, NamespaceTool)
        for inner in tool.tools
    }


def chosen_name(name: str, tools: Sequence[ResponseTool] | None) -> str:
    """Returns the chat's name of a function that `tool_choice` names. Raises InvalidRequestError."""
    if any(isinstance(tool, FunctionTool) and tool.name == name for tool in tools or ()):
        return name
    found = [flat for flat, called in called_names(tools).items() if called["name"] == name]
    if len(found) > 1:
        raise InvalidRequestError(f"several namespaces have a function {name!r}: rename one", "tool_choice")
    return found[0] if found else name
