"""Log probabilities of the tokens in each part of an output."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from tandem.router.frontends.generation import Piece
from tandem.router.frontends.openai.answers import token_text
from tandem.router.text.detokenizer import IncrementalDetokenizer
from tandem.router.text.output_parts import Part
from tandem.router.text.tokenizer import Tokenizer
from tandem.sampling_params import TokenLogprobs


class TextLogprobs:
    """Finds the tokens of each part by their place in the output's text.

    A token belongs to the part with its first character. Tokens between parts, for example marks of calls, belong to
    none.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Mapping[int, str] | None) -> None:
        """Args: marks: special tokens that the output's text shows, by id."""
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, marks)
        # The place of each token's first character, in the text of all tokens.
        self._entries: deque[tuple[int, int, TokenLogprobs]] = deque()
        self._num_characters = 0
        # Text of the output behind the last part.
        self._rest = ""
        self._rest_start = 0

    def feed(self, piece: Piece) -> None:
        """Call it with each piece, before `take` with the parts that come of it."""
        self._rest += piece.text
        for token_id, entry in zip(piece.token_ids, piece.logprobs, strict=False):
            self._entries.append((self._num_characters, token_id, entry))
            self._num_characters += len(self._detokenizer.decode_next([token_id]))

    def take(self, part: Part) -> list[dict[str, Any]]:
        """Returns the part's entries. Call it with each part, in order."""
        # Marks before it may hold the same characters.
        place = self._rest.rfind(part.text, 0, max(len(part.text), part.end - self._rest_start))
        if place < 0:
            return []
        start = self._rest_start + place
        end = start + len(part.text)
        self._rest, self._rest_start = self._rest[place + len(part.text) :], end
        found = []
        while self._entries and self._entries[0][0] < end:
            first, token_id, entry = self._entries.popleft()
            if first >= start:
                top = [self._entry(other.token_id, other.logprob) for other in entry.top]
                found.append({**self._entry(token_id, entry.logprob), "top_logprobs": top})
        return found

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        piece = self._tokenizer.token_piece(token_id)
        return {"token": token_text(piece), "bytes": list(piece), "logprob": logprob}
