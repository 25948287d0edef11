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

# Names that a client may not set.
RESERVED = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "chat_template")
)


class ChatTemplate:
    """Sandboxed, because the template is the model's own code."""

    def __init__(self, source: str, tools_source: str = "") -> None:
        """Raises ValueError for a malformed template. Args: tools_source: separate template for chats with tools, if
        any."""
        self.source = source + tools_source
        try:
            self._template = _environment().from_string(source)
            self._tools_template = _environment().from_string(tools_source) if tools_source else self._template
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the model's chat template is malformed: {error}") from error

    def render(self, chat: Chat, special_tokens: Mapping[str, str]) -> str:
        """Raises ValueError if the template rejects this chat.

        Args:
            special_tokens: special tokens by their template names, for example ``bos_token``.
        """
        messages = chat.messages
        mark = ""
        if chat.is_continued:
            # A random mark finds the template's text after the last message.
            mark = secrets.token_hex(16)
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + mark}]
        variables = {
            **chat.variables,
            **special_tokens,
            "messages": messages,
            # Templates test these for none, which undefined is not.
            "tools": chat.tools or None,
            "documents": chat.documents,
            "add_generation_prompt": chat.add_generation_prompt and not chat.is_continued,
        }
        try:
            text = (self._tools_template if chat.tools else self._template).render(variables)
        except Exception as error:  # Any exception of the template rejects the chat.
            raise ValueError(f"the model's chat template rejects the messages: {error}") from error
        if mark:
            text, found, _ = text.partition(mark)
            if not found:
                raise ValueError("the model's chat template does not show the last message, so it cannot be continued")
        return text


def read_chat_template(path: Path) -> ChatTemplate:
    """Raises ValueError if the operator's template is unreadable or malformed."""
    try:
        return ChatTemplate(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the chat template {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"the chat template {path} cannot be used: {error}") from error


def find_chat_template(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate:
    """Reads chat_template.jinja or tokenizer_config.json. Of several templates, takes "default", with "tool_use" for
    chats with tools. Raises ValueError if it is missing or malformed."""
    file = model_dir / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else tokenizer_config.get("chat_template")
    tools_source = ""
    if isinstance(source, list):
        named = {entry.get("name"): entry["template"] for entry in source}
        source, tools_source = named.get("default"), named.get("tool_use", "")
    if not isinstance(source, str):
        raise ValueError(
            "the model has no chat template: send a plain prompt instead (/v1/completions, or tandem generate --raw)"
        )
    return ChatTemplate(source, tools_source)


class _GenerationTag(Extension):
    """Ignores ``{% generation %}``, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
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
    # Jinja's own filter escapes HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
