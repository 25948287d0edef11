"""A model's chat template: from the messages of a conversation to the text of a prompt."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """A template, compiled. It is the model's own code, so it runs in a sandbox."""

    def __init__(self, source: str) -> None:
        """Raises ValueError: the template is malformed."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the model's chat template is malformed: {error}") from error

    def render(self, messages: Sequence[dict[str, str]], special_tokens: Mapping[str, str]) -> str:
        """The text of a conversation up to where the assistant's answer begins, with BOS where the model wants one.

        Args:
            messages: each with ``role`` and ``content``.
            special_tokens: those that a template may name, such as ``bos_token``.

        Raises:
            ValueError: the template rejects these messages.
        """
        try:
            return self._template.render(
                messages=messages,
                # Templates ask whether these are none, and what is undefined is not none: so they are given.
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **special_tokens,
            )
        except Exception as error:  # Whatever the model's code raises, it refused these messages.
            raise ValueError(f"the model's chat template rejects the messages: {error}") from error


def find_chat_template(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate:
    """The template in chat_template.jinja, or else the one in tokenizer_config.json: the only one, or that named
    "default".

    Raises:
        ValueError: there is none, or it is malformed.
    """
    file = model_dir / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else tokenizer_config.get("chat_template")
    if isinstance(source, list):
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        raise ValueError("the model has no chat template: send a plain prompt instead")
    return ChatTemplate(source)


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
