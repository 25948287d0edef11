"""Strings that end an output, found in text that comes in pieces."""

from collections.abc import Sequence

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1024
# Longer pieces, such as all that a resumed request has, are searched as a whole: one character after the other takes a
# microsecond or two for each.
MAX_STEPPED_CHARACTERS = 1024


def check_stop_strings(stop_strings: Sequence[str]) -> None:
    """Raises ValueError, with a message for the client, if they are too many, too long, or empty."""
    if len(stop_strings) > MAX_STOP_STRINGS:
        raise ValueError(f"stop must be at most {MAX_STOP_STRINGS} strings, not {len(stop_strings)}")
    for stop in stop_strings:
        if not 1 <= len(stop) <= MAX_STOP_STRING_LENGTH:
            raise ValueError(f"stop strings must have 1 to {MAX_STOP_STRING_LENGTH} characters, not {len(stop)}")


class StopStringMatcher:
    """Passes text on up to the first stop string, and none that may still become part of one.

    The first is the one that is complete first, character by character, so what is found does not depend on how the
    text was cut into pieces; of those complete at the same character it is the longest.

    It holds back what Knuth, Morris and Pratt's automata of the stop strings have matched so far; the work for each
    character does not grow with the text.

    Attributes:
        found: the stop string that was found, after which nothing is passed on any more; None: none was.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """Args: stop_strings: none of them empty."""
        self._automata = [_Automaton(stop) for stop in stop_strings]
        self._held = ""
        self.found: str | None = None

    @property
    def matched(self) -> bool:
        return self.found is not None

    def scan_next(self, text: str) -> str:
        """Takes the next piece of the text. Returns what is now certain to be no part of a stop string; once matched,
        nothing."""
        if self.matched:
            return ""
        start, text = len(self._held), self._held + text
        if len(text) - start > MAX_STEPPED_CHARACTERS:
            start = self._skip_ahead(text)
        for position in range(start, len(text)):
            complete = [a.pattern for a in self._automata if a.advance(text[position])]
            if complete:
                self.found = max(complete, key=len)
                self._held = ""
                return text[: position + 1 - len(self.found)]
        num_held = max((a.num_matched for a in self._automata), default=0)
        certain = len(text) - num_held
        self._held = text[certain:]
        return text[:certain]

    def _skip_ahead(self, text: str) -> int:
        """Begins anew shortly before the first stop string is complete, or else shortly before the text's end: what is
        further back than the longest one has no part in what is found there. Returns where."""
        found = [(text.find(a.pattern), len(a.pattern)) for a in self._automata]
        end = min((start + length for start, length in found if start >= 0), default=len(text))
        for automaton in self._automata:
            automaton.num_matched = 0
        return max(0, end - max((length for _, length in found), default=0))

    def release_held(self) -> str:
        """The text has ended without a match: returns what was held back."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """One stop string, and how much of it the text so far ends with."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.num_matched = 0
        # For each prefix of the pattern: the length of the longest shorter prefix that it ends with.
        self._fallback = [0] * len(pattern)
        matched = 0
        for i in range(1, len(pattern)):
            matched = self._next(matched, pattern[i])
            self._fallback[i] = matched

    def advance(self, character: str) -> bool:
        """Takes the text's next character; returns whether the whole string is there. Nothing may follow then."""
        self.num_matched = self._next(self.num_matched, character)
        return self.num_matched == len(self.pattern)

    def _next(self, matched: int, character: str) -> int:
        while matched and self.pattern[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + 1 if self.pattern[matched] == character else 0
