"""Text to token ids and back, and chats to prompts. Imports neither torch nor transformers."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_REPLACEMENT = "\ufffd"  # what decoding gives for bytes that are no character, or not yet one
_WORD_START = "\u2581"  # how SentencePiece's vocabularies spell a space
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """The tokenizer of a model directory, read from its JSON files alone.

    Args:
        model_dir: holds tokenizer.json and config.json; tokenizer_config.json, generation_config.json and
            chat_template.jinja are used where present.

    Attributes:
        vocab_size: rows of the model's embedding; not every id below it need be a token.
        max_model_len: the longest sequence the model was made for, in tokens.
        eos_token_ids: the ids that end an output; empty if the model names none.

    Raises:
        ValueError: a file is missing or malformed, or lacks something needed.
    """

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        path = tokenizer_file(model_dir)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"cannot read {path}: {error}") from error
        # The file may carry the limits of its authors' training; a prompt is never cut or padded here.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._token_bytes: dict[int, bytes] = {}

        config = _read_json(model_dir / "config.json")
        self._settings = _read_json(model_dir / "tokenizer_config.json", optional=True)
        self.vocab_size = _positive(config, "vocab_size", model_dir)
        self.max_model_len = _positive(config, "max_position_embeddings", model_dir)
        self.eos_token_ids = self._find_eos(config)

    def encode(self, text: str) -> list[int]:
        """The token ids of a prompt, with BOS where the model wants one. Special tokens are recognised.

        Raises:
            ValueError: the text holds half a character.
        """
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The token ids of a conversation up to where the assistant's answer begins.

        Args:
            messages: each with ``role`` and ``content``.

        Raises:
            ValueError: the model has no chat template, its template rejects these messages, or they hold
                half a character.
        """
        template = self._chat_template
        try:
            text = template.render(
                messages=messages,
                # Named though absent: templates ask whether they are none, and undefined is not none.
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens(),
            )
        except Exception as error:  # a template is the model's code: whatever it raises, it refused these
            raise ValueError(f"the model's chat template rejects the messages: {error}") from error
        # The template writes BOS itself.
        return self._encode(text, add_special_tokens=False)

    @cached_property
    def max_token_bytes(self) -> int:
        """More bytes of text than any one token stands for."""
        return 4 * max(len(token) for token in self._tokenizer.get_vocab())

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids`` without special tokens; U+FFFD for bytes that form no character."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    @cached_property
    def byte_level(self) -> bool:
        """Whether the text of a sequence is the concatenation of its tokens' bytes."""
        return isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel)

    def token_text(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for a special token or an id that is no token."""
        if token_id in self._special_ids:
            return None
        return self._tokenizer.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text of a byte-level tokenizer; empty for special and unused ids."""
        found = self._token_bytes.get(token_id)
        if found is None:
            token = self.token_text(token_id) or ""
            try:
                found = bytes(_BYTE_OF[character] for character in token)
            except KeyError:  # an added token, spelled in plain text
                found = token.encode()
            self._token_bytes[token_id] = found
        return found

    def token_piece(self, token_id: int) -> bytes:
        """A token by itself, as log probabilities list it: what it stands for in the text, or a special token's name.
        Empty for an id that is no token."""
        if token_id in self._special_ids:
            return (self._tokenizer.id_to_token(token_id) or "").encode()
        if self.byte_level:
            return self.token_bytes(token_id)
        token = self.token_text(token_id) or ""
        if _BYTE_TOKEN.fullmatch(token):
            return bytes((int(token[3:5], 16),))
        return token.replace(_WORD_START, " ").encode()

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # JSON may carry what UTF-8 cannot, and the tokenizer takes UTF-8
            raise ValueError("the text holds a lone surrogate, which is half a character") from error

    @cached_property
    def _chat_template(self) -> jinja2.Template:
        file = self._model_dir / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else self._settings.get("chat_template")
        if isinstance(source, list):
            source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
        if not isinstance(source, str):
            raise ValueError("the model has no chat template: send a plain prompt instead")
        try:
            return _chat_environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the model's chat template is malformed: {error}") from error

    def _special_tokens(self) -> dict[str, str]:
        """The special tokens a template may name: bos_token, eos_token and so on."""
        found = {}
        for name, value in self._settings.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
        return found

    def _find_eos(self, config: dict[str, Any]) -> tuple[int, ...]:
        generation = _read_json(self._model_dir / "generation_config.json", optional=True)
        for source in (generation, config):
            ids = source.get("eos_token_id")
            if ids is not None:
                return tuple(ids) if isinstance(ids, list) else (ids,)
        named = self._special_tokens().get("eos_token")
        index = self._tokenizer.token_to_id(named) if named is not None else None
        return () if index is None else (index,)


def tokenizer_file(model_dir: Path) -> Path:
    """The file that a model's tokenizer is read from. Raises ValueError if it is not there."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{model_dir} has no tokenizer.json; other tokenizer formats are not supported")
    return path


class IncrementalDetokenizer:
    """Turns a stream of token ids into a stream of text.

    Everything pushed and flushed, put together, is exactly ``tokenizer.decode`` of all the ids. A character
    is never split: while its bytes are incomplete it waits for the next token. The work per token does not
    grow with the text so far.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = _ByteStream(tokenizer) if tokenizer.byte_level else _WindowStream(tokenizer)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete; possibly empty."""
        return self._stream.push(token_ids)

    def flush(self) -> str:
        """The rest of the text, U+FFFD for an incomplete character; the next push starts a new text."""
        return self._stream.flush()


class _ByteStream:
    """For byte-level tokenizers: the text is the tokens' bytes put together and decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, token_ids)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """For other tokenizers: decodes the last few tokens with and without the new ones; the rest is new text.

    The earlier tokens are there because decoders treat the first token of a sequence in a way of its own
    (they drop its leading space). Byte tokens (``<0xE2>``) wait for the end of their run: one byte that does
    not fit turns the whole run into replacement characters, the part before it too.
    """

    # More than one character has bytes (4), so that an incomplete one lies whole in the window.
    _KEPT = 6

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._waiting: list[int] = []
        self._given = 0  # how much of the window's text is out

    def push(self, token_ids: Sequence[int]) -> str:
        # Tokens without text must not push the others out of the window.
        self._waiting += [index for index in token_ids if self._tokenizer.token_text(index)]
        if not self._waiting or _BYTE_TOKEN.fullmatch(self._tokenizer.token_text(self._waiting[-1]) or ""):
            return ""
        return self._advance(held=_REPLACEMENT)

    def flush(self) -> str:
        rest = self._advance(held="")
        self._window, self._given = [], 0
        return rest

    def _advance(self, held: str) -> str:
        """Takes the waiting tokens in and gives the new text, less one ``held`` at its end."""
        self._window += self._waiting
        self._waiting = []
        text = self._tokenizer.decode(self._window)
        kept_back = len(held) if text.endswith(held) else 0
        fresh = text[self._given : len(text) - kept_back]
        self._window = self._window[-self._KEPT :]
        self._given = len(self._tokenizer.decode(self._window)) - kept_back
        return fresh


def _read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def _positive(config: dict[str, Any], name: str, model_dir: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{model_dir / 'config.json'}: {name} must be a positive integer, got {value!r}")
    return value


def _byte_alphabet() -> dict[str, int]:
    """The characters in which byte-level vocabularies spell bytes: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + order): byte for order, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; here its content is simply written."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _chat_environment() -> ImmutableSandboxedEnvironment:
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
    # Jinja's own filter escapes for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
