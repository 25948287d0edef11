"""Text to token ids and back. Imports neither torch nor transformers."""

import json
import re
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from tandem.router.text.chat import Chat, Message
from tandem.router.text.chat_format import ChatFormat, find_format, fitted, takes_role
from tandem.router.text.chat_template import ChatTemplate, find_chat_template, read_chat_template
from tandem.router.text.fill_in_middle import FIM_FORMS, FimForm

# SentencePiece's spelling of a space.
_WORD_START = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """
    Args:
        model_dir: directory with tokenizer.json and config.json, optionally with tokenizer_config.json,
            generation_config.json and chat_template.jinja.
        chat_template: file that replaces the model's chat template.

    Attributes:
        vocab_size: rows of the model's embedding; some ids may be unused.
        eos_token_ids: ids that end an output; empty if the model names none.

    Raises:
        ValueError: a file is missing or malformed.
    """

    def __init__(self, model_dir: Path, chat_template: Path | None = None) -> None:
        self._model_dir = model_dir
        self._own_template = read_chat_template(chat_template) if chat_template else None
        path = tokenizer_file(model_dir)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises bare Exception.
            raise ValueError(f"cannot read {path}: {error}") from error
        # The file may carry training-time limits.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._token_bytes: dict[int, bytes] = {}

        config = _read_json(model_dir / "config.json")
        self._settings = _read_json(model_dir / "tokenizer_config.json", optional=True)
        self.vocab_size = _positive(config, "vocab_size", model_dir)
        self.eos_token_ids = self._find_eos(config)

    def encode(self, text: str) -> list[int]:
        """Adds BOS if the model wants one, and recognizes special tokens. Raises ValueError for a lone surrogate."""
        return self.tokenize(text, add_special_tokens=True).ids

    def tokenize(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        """Runs without the GIL; building the list `ids` of the result needs it. Raises ValueError for a lone
        surrogate."""
        try:
            # `encode` gives the same ids but holds the GIL, for a second per some million characters.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except TypeError as error:  # JSON may carry lone surrogates.
            raise ValueError("the text holds a lone surrogate, which is half a character") from error

    @cached_property
    def num_special_tokens(self) -> int:
        """Special tokens that `tokenize` adds to a text."""
        return self._tokenizer.num_special_tokens_to_add(False)

    def finish(self, encoding: tokenizers.Encoding, add_special_tokens: bool) -> list[int]:
        """Returns the ids of a text's encoding that was made without special tokens."""
        return self._tokenizer.post_process(encoding, None, add_special_tokens).ids

    def encode_chat(self, chat: Chat | Sequence[Message]) -> list[int]:
        # The template writes BOS.
        return self.tokenize(self.render_chat(chat), add_special_tokens=False).ids

    def render_chat(self, chat: Chat | Sequence[Message]) -> str:
        """Returns the text up to the start of the output. Holds the GIL. Raises ValueError if the model has no chat
        template, or it rejects this chat."""
        chat = chat if isinstance(chat, Chat) else Chat(chat)
        return self._chat_template.render(fitted(chat, self.chat_format), self._special_tokens())

    @cached_property
    def chat_format(self) -> ChatFormat:
        """Takes some milliseconds once."""
        try:
            template = self._chat_template
        except ValueError:
            # Each chat is refused.
            return ChatFormat()
        special_tokens = self._special_tokens()
        return find_format(template.source, lambda chat: template.render(chat, special_tokens))

    def takes_role(self, role: str) -> bool:
        """Whether the chat template writes messages of this role, with its name. Raises ValueError if the model has no
        chat template."""
        template, special_tokens = self._chat_template, self._special_tokens()
        return takes_role(role, lambda chat: template.render(chat, special_tokens))

    @cached_property
    def fim_form(self) -> FimForm | None:
        """None if the vocabulary has no tokens for filling in the middle."""
        return next((form for form in FIM_FORMS if len(self.special_ids(form.marks)) == len(form.marks)), None)

    @property
    def knows_documents(self) -> bool:
        return "documents" in self._chat_template.source

    @property
    def special_token_names(self) -> frozenset[str]:
        return frozenset(self._special_tokens())

    @cached_property
    def description(self) -> dict[str, Any]:
        """Data for remote tokenization, including the transformers class for these files."""
        found: dict[str, Any] = {"tokenizer_class": self._settings.get("tokenizer_class"), **self._special_tokens()}
        if self.eos_token_ids:
            found.setdefault("eos_token", self.spelling(self.eos_token_ids[0]))
        try:
            found["chat_template"] = self._chat_template.source
        except ValueError:
            found["chat_template"] = None
        return found

    def special_ids(self, texts: Collection[str]) -> dict[int, str]:
        found = {self._tokenizer.token_to_id(text): text for text in texts}
        return {index: text for index, text in found.items() if index in self._special_ids}

    def token_id(self, text: str) -> int | None:
        return self._tokenizer.token_to_id(text)

    @cached_property
    def max_token_bytes(self) -> int:
        return 4 * max(len(token) for token in self._tokenizer.get_vocab())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decodes with U+FFFD for invalid bytes."""
        return self._tokenizer.decode(token_ids, skip_special_tokens)

    def decode_prompt(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """As `decode`, without the GIL."""
        return self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def spelling(self, token_id: int) -> str:
        """ "" for an unused id."""
        return self._tokenizer.id_to_token(token_id) or ""

    @cached_property
    def byte_level(self) -> bool:
        """True if a text is the concatenation of its tokens' bytes."""
        return isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel)

    def token_text(self, token_id: int) -> str | None:
        """None for a special or unused id."""
        if token_id in self._special_ids:
            return None
        return self._tokenizer.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """For byte-level vocabularies; empty for special and unused ids."""
        found = self._token_bytes.get(token_id)
        if found is None:
            token = self.token_text(token_id) or ""
            try:
                found = bytes(_BYTE_OF[character] for character in token)
            except KeyError:  # Added tokens are plain text.
                found = token.encode()
            self._token_bytes[token_id] = found
        return found

    def token_piece(self, token_id: int) -> bytes:
        """A token's bytes for log probabilities: its text, or a special token's name; empty for an unused id."""
        if token_id in self._special_ids:
            return (self._tokenizer.id_to_token(token_id) or "").encode()
        if self.byte_level:
            return self.token_bytes(token_id)
        token = self.token_text(token_id) or ""
        if is_byte_token(token):
            return bytes((int(token[3:5], 16),))
        return token.replace(_WORD_START, " ").encode()

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        return self._own_template or find_chat_template(self._model_dir, self._settings)

    def _special_tokens(self) -> dict[str, str]:
        found = {}
        for name, value in self._settings.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
        return found

    def _find_eos(self, config: dict[str, Any]) -> tuple[int, ...]:
        """Reads eos_token_id of generation_config.json, else of config.json, else eos_token of tokenizer_config.json.
        Only the first source counts: its authors left out other ids on purpose."""
        generation = _read_json(self._model_dir / "generation_config.json", optional=True)
        for name, source in (("generation_config.json", generation), ("config.json", config)):
            ids = source.get("eos_token_id")
            if ids is not None:
                found = tuple(ids) if isinstance(ids, list) else (ids,)
                if wrong := [i for i in found if not isinstance(i, int) or i < 0]:
                    raise ValueError(f"{self._model_dir / name}: eos_token_id {wrong[0]!r} is not a token id")
                return found
        named = self._special_tokens().get("eos_token")
        index = self._tokenizer.token_to_id(named) if named is not None else None
        return () if index is None else (index,)


def tokenizer_file(model_dir: Path) -> Path:
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{model_dir} has no tokenizer.json; other tokenizer formats are not supported")
    return path


def is_byte_token(token: str) -> bool:
    """True for a single byte in a non-byte-level vocabulary: ``<0xE2>``."""
    return _BYTE_TOKEN.fullmatch(token) is not None


def _read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
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
    """Printable characters stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + order): byte for order, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
