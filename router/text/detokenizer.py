"""Token ids to text, as they come."""

import codecs
from collections.abc import Mapping, Sequence

from tandem.router.text.tokenizer import Tokenizer, is_byte_token

# Decoding gives this for bytes that are no character, or not yet one.
_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """The text of one sequence of tokens, piece by piece.

    All that it returns, put together, is exactly ``tokenizer.decode`` of all the ids. A character is never split: while
    its bytes are incomplete it waits for the next token. The work per token does not grow with the text so far.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Mapping[int, str] | None = None) -> None:
        """Args: marks: special tokens that are text all the same, by id. What comes behind one is decoded as a text of
        its own."""
        self._detokenizer = _ByteDetokenizer(tokenizer) if tokenizer.byte_level else _WindowDetokenizer(tokenizer)
        self._marks = marks

    def decode_next(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete; possibly empty."""
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
        """The rest of the text, U+FFFD for an incomplete character; the ids that come after it begin a new text."""
        return self._detokenizer.decode_rest()


class _ByteDetokenizer:
    """For byte-level tokenizers: the text is the tokens' bytes put together and decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The beginning of a character.
        self._waiting = b""

    def decode_next(self, token_ids: Sequence[int]) -> str:
        waiting = self._waiting + b"".join(map(self._tokenizer.token_bytes, token_ids))
        # This is what an incremental decoder of the library calls, less the two calls around it.
        text, num_decoded = codecs.utf_8_decode(waiting, "replace", False)
        self._waiting = waiting[num_decoded:]
        return text

    def decode_rest(self) -> str:
        rest, self._waiting = self._waiting.decode(errors="replace"), b""
        return rest


class _WindowDetokenizer:
    """For other tokenizers: decodes the last few tokens with and without the new ones; the rest is new text.

    The earlier tokens are there because decoders treat the first token of a sequence in a way of its own
    (they drop its leading space). Byte tokens (``<0xE2>``) wait for the end of their run: one byte that does
    not fit turns the whole run into replacement characters, the part before it too.
    """

    # It is more than the bytes of one character (4), so that an incomplete one lies whole in the window.
    _KEPT = 6

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._waiting: list[int] = []
        # How many characters of the window's text have been returned.
        self._given = 0

    def decode_next(self, token_ids: Sequence[int]) -> str:
        # Tokens without text must not push the others out of the window.
        self._waiting += [index for index in token_ids if self._tokenizer.token_text(index)]
        if not self._waiting or is_byte_token(self._tokenizer.token_text(self._waiting[-1]) or ""):
            return ""
        return self._advance(held=_REPLACEMENT)

    def decode_rest(self) -> str:
        rest = self._advance(held="")
        self._window, self._given = [], 0
        return rest

    def _advance(self, held: str) -> str:
        """Takes the waiting tokens into the window and returns the new text, less one ``held`` at its end."""
        self._window += self._waiting
        self._waiting = []
        text = self._tokenizer.decode(self._window)
        kept_back = len(held) if text.endswith(held) else 0
        fresh = text[self._given : len(text) - kept_back]
        self._window = self._window[-self._KEPT :]
        self._given = len(self._tokenizer.decode(self._window)) - kept_back
        return fresh
