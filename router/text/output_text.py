from collections.abc import Mapping, Sequence

from tandem.router.text.detokenizer import IncrementalDetokenizer
from tandem.router.text.stop_strings import StopStringMatcher
from tandem.router.text.tokenizer import Tokenizer


class OutputText:
    """Text of an output over all attempts, up to the first stop string; no token may follow it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_token_ids: Sequence[int],
        stop_strings: Sequence[str],
        min_tokens: int = 0,
        marks: Mapping[int, str] | None = None,
    ) -> None:
        """
        Args:
            min_tokens: tokens before the search for stop strings starts.
            marks: special tokens to show as text, by id.
        """
        self._detokenizer = IncrementalDetokenizer(tokenizer, marks)
        # Stop tokens count as output, but have no text.
        self._stop_token_ids = frozenset(stop_token_ids)
        self._matcher = StopStringMatcher(stop_strings) if stop_strings else None
        self._num_free = min_tokens if stop_strings else 0
        # Characters of the coming text that the client already has.
        self._num_to_skip = 0
        self.stopped = False

    @property
    def stop_string(self) -> str | None:
        return self._matcher.found if self._matcher is not None else None

    def replay(self, token_ids: Sequence[int], num_characters: int) -> str:
        """Returns the client's missing text of these tokens.

        Args:
            num_characters: length of the client's text. A surplus over these tokens' text, from other groups of tokens,
                is left out later.
        """
        self._num_to_skip = num_characters
        num_free = min(self._num_free, len(token_ids))
        self._num_free -= num_free
        text = self._detokenizer.decode_next([i for i in token_ids[:num_free] if i not in self._stop_token_ids])
        rest = self._detokenizer.decode_next([i for i in token_ids[num_free:] if i not in self._stop_token_ids])
        # Searched as a whole: the text may be as long as the model allows.
        return self._skip(text + (rest if self._matcher is None else self._search(self._matcher, rest)))

    def append_tokens(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Returns the text to pass on, and the number of tokens up to the one that completed a stop string."""
        text, num_tokens = self._append(token_ids)
        return self._skip(text) if self._num_to_skip else text, num_tokens

    def _skip(self, text: str) -> str:
        num_skipped = min(self._num_to_skip, len(text))
        self._num_to_skip -= num_skipped
        return text[num_skipped:]

    def _append(self, token_ids: Sequence[int]) -> tuple[str, int]:
        if self._matcher is None:
            if self._stop_token_ids.isdisjoint(token_ids):
                return self._detokenizer.decode_next(token_ids), len(token_ids)
            kept_ids = [i for i in token_ids if i not in self._stop_token_ids]
            return self._detokenizer.decode_next(kept_ids), len(token_ids)
        text = ""
        for num_tokens, token_id in enumerate(token_ids, 1):
            is_free = self._num_free > 0
            self._num_free -= is_free
            if token_id not in self._stop_token_ids:
                decoded = self._detokenizer.decode_next((token_id,))
                text += decoded if is_free else self._search(self._matcher, decoded)
            if self.stopped:
                return text, num_tokens
        return text, len(token_ids)

    def _search(self, matcher: StopStringMatcher, text: str) -> str:
        passed_on = matcher.scan_next(text)
        self.stopped = matcher.matched
        return passed_on

    def finish_text(self) -> str:
        """Returns the rest of the text, which may still complete a stop string."""
        rest = self._detokenizer.decode_rest()
        if self._matcher is not None:
            rest = self._search(self._matcher, rest) + self._matcher.release_held()
        return self._skip(rest)
