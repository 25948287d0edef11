"""A model's chat template: from the messages of a conversation to the text of a prompt."""

import json
import secrets
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.router.text.chat import Chat

# What a client may not set by a name of its own.
RESERVED = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "chat_template")
)


class ChatTemplate:
    """A template, compiled. It is the model's own code, so it runs in a sandbox.

    Attributes:
        source: its text.
    """

    def __init__(self, source: str, tools_source: str = "") -> None:
        """
        Args:
            tools_source: of the template for chats with tools, if that is another.

        Raises:
            ValueError: a template is malformed.
        """
        self.source = source + tools_source
        try:
            self._template = _environment().from_string(source)
            self._tools_template = _environment().from_string(tools_source) if tools_source else self._template
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the model's chat template is malformed: {error}") from error

    def render(self, chat: Chat, special_tokens: Mapping[str, str]) -> str:
        """The text of a conversation up to where the output begins, with BOS where the model wants one.

        Args:
            special_tokens: those that a template may name, such as ``bos_token``.

        Raises:
            ValueError: the template rejects this chat.
        """
        messages = chat.messages
        mark = ""
        if chat.is_continued:
            # What the template writes behind the last message is found by what nobody can have written.
            mark = secrets.token_hex(16)
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + mark}]
        variables = {
            **chat.variables,
            **special_tokens,
            "messages": messages,
            # Templates ask whether these are none, and what is undefined is not none: so they are given.
            "tools": chat.tools or None,
            "documents": chat.documents,
            "add_generation_prompt": chat.add_generation_prompt and not chat.is_continued,
        }
        try:
            text = (self._tools_template if chat.tools else self._template).render(variables)
        except Exception as error:  # Whatever the model's code raises, it refused this chat.
            raise ValueError(f"the model's chat template rejects the messages: {error}") from error
        if mark:
            text, found, _ = text.partition(mark)
            if not found:
                raise ValueError("the model's chat template does not show the last message: it cannot be gone on with")
        return text


def read_chat_template(path: Path) -> ChatTemplate:
    """A template of the operator's own. Raises ValueError: it cannot be read, or is malformed."""
    try:
        return ChatTemplate(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the chat template {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"the chat template {path} cannot be used: {error}") from error


def find_chat_template(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate:
    """The template in chat_template.jinja, or else the one in tokenizer_config.json: the only one, or that named
    "default", and for chats with tools that named "tool_use".

    Raises:
        ValueError: there is none, or it is malformed.
    """
    file = model_dir / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else tokenizer_config.get("chat_template")
    tools_source = ""
    if isinstance(source, list):
        named = {entry.get("name"): entry["template"] for entry in source}
        source, tools_source = named.get("default"), named.get("tool_use", "")
    if not isinstance(source, str):
        raise ValueError("the model has no chat template: send a plain prompt instead")
    return ChatTemplate(source, tools_source)


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; here its content is simply written."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment chat templates are written for: what they may call, and no more."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which a prompt is not.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
