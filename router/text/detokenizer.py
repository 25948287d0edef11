"""Incremental detokenization."""

import codecs
from collections.abc import Mapping, Sequence

from tandem.router.text.tokenizer import Tokenizer, is_byte_token

# Decoded form of invalid or incomplete bytes.
_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Pieces join to `tokenizer.decode` of all ids. Work per token is constant."""

    def __init__(self, tokenizer: Tokenizer, marks: Mapping[int, str] | None = None) -> None:
        """Args: marks: special tokens to show as text, by id. The tokens after one decode as a new text."""
        self._detokenizer = _ByteDetokenizer(tokenizer) if tokenizer.byte_level else _WindowDetokenizer(tokenizer)
        self._marks = marks

    def decode_next(self, token_ids: Sequence[int]) -> str:
        if not self._marks or self._marks.keys().isdisjoint(token_ids):
            return self._detokenizer.decode_next(token_ids)
        texts: list[str] = []
        start = 0
        for place, token_id in enumerate(token_ids):
            if token_id in self._marks:
                texts += self._detokenizer.decode_next(token_ids[start:place]), self._detokenizer.decode_rest()
                texts.append(self._marks[token_id])
                start = place + 1
        return "".join((*texts, self._detokenizer.decode_next(token_ids[start:])))

    def decode_rest(self) -> str:
        """Returns the rest, with U+FFFD for an incomplete character. Later ids start a new text."""
        return self._detokenizer.decode_rest()


class _ByteDetokenizer:
    """For byte-level tokenizers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Bytes of an incomplete character.
        self._waiting = b""

    def decode_next(self, token_ids: Sequence[int]) -> str:
        waiting = self._waiting + b"".join(map(self._tokenizer.token_bytes, token_ids))
        # As the library's incremental decoder, without two calls around it.
        text, num_decoded = codecs.utf_8_decode(waiting, "replace", False)
        self._waiting = waiting[num_decoded:]
        return text

    def decode_rest(self) -> str:
        rest, self._waiting = self._waiting.decode(errors="replace"), b""
        return rest


class _WindowDetokenizer:
    """Decodes the last few tokens with and without the new ones.

    The window exists because decoders drop the first token's leading space. Byte tokens (``<0xE2>``) wait for the end
    of their run: one invalid byte turns the whole run into replacement characters.
    """

    # More than the 4 bytes of one character.
    _KEPT = 6

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._waiting: list[int] = []
        # Characters of the window's text already returned.
        self._given = 0

    def decode_next(self, token_ids: Sequence[int]) -> str:
        self._waiting += [index for index in token_ids if self._tokenizer.token_text(index)]
        if not self._waiting or is_byte_token(self._tokenizer.token_text(self._waiting[-1]) or ""):
            return ""
        return self._advance(held=_REPLACEMENT)

    def decode_rest(self) -> str:
        rest = self._advance(held="")
        self._window, self._given = [], 0
        return rest

    def _advance(self, held: str) -> str:
        """Returns the new text without one `held` at its end."""
        self._window += self._waiting
        self._waiting = []
        text = self._tokenizer.decode(self._window)
        kept_back = len(held) if text.endswith(held) else 0
        fresh = text[self._given : len(text) - kept_back]
        self._window = self._window[-self._KEPT :]
        self._given = len(self._tokenizer.decode(self._window)) - kept_back
        return fresh
