from collections.abc import Sequence
from functools import lru_cache

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1024
# Longer pieces are searched as a whole: a step takes 1 to 2 us per character.
MAX_STEPPED_CHARACTERS = 1024
# A request's outputs share their tables: 16 of them take 2 ms, and there may be 128 outputs.
NUM_KEPT_TABLES = 64


def check_stop_strings(stop_strings: Sequence[str]) -> None:
    """Raises ValueError for the client."""
    if len(stop_strings) > MAX_STOP_STRINGS:
        raise ValueError(f"stop must be at most {MAX_STOP_STRINGS} strings, not {len(stop_strings)}")
    for stop in stop_strings:
        if not 1 <= len(stop) <= MAX_STOP_STRING_LENGTH:
            raise ValueError(f"stop strings must have 1 to {MAX_STOP_STRING_LENGTH} characters, not {len(stop)}")


class StopStringMatcher:
    """Passes text on up to the first stop string, and holds back text that may become part of one.

    The first stop string is the one complete at the earliest character, and the longest of several. Work per character
    is constant. After a match no text is passed on.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stop_strings]
        self._held = ""
        self.found: str | None = None

    @property
    def matched(self) -> bool:
        return self.found is not None

    def scan_next(self, text: str) -> str:
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
        """Restarts shortly before the end of the first stop string, or of the text: earlier text cannot matter. Returns
        the new position."""
        found = [(text.find(a.pattern), len(a.pattern)) for a in self._automata]
        end = min((start + length for start, length in found if start >= 0), default=len(text))
        for automaton in self._automata:
            automaton.num_matched = 0
        return max(0, end - max((length for _, length in found), default=0))

    def release_held(self) -> str:
        held, self._held = self._held, ""
        return held


class _Automaton:
    """A Knuth-Morris-Pratt automaton for one stop string."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.num_matched = 0
        self._fallback = _fallback(pattern)

    def advance(self, character: str) -> bool:
        """Returns whether the whole string is matched; no character may follow then."""
        self.num_matched = _next(self.pattern, self._fallback, self.num_matched, character)
        return self.num_matched == len(self.pattern)


@lru_cache(NUM_KEPT_TABLES)
def _fallback(pattern: str) -> Sequence[int]:
    """Returns the length of the longest proper border of each prefix."""
    found = [0] * len(pattern)
    matched = 0
    for i in range(1, len(pattern)):
        matched = found[i] = _next(pattern, found, matched, pattern[i])
    return found


def _next(pattern: str, fallback: Sequence[int], matched: int, character: str) -> int:
    while matched and pattern[matched] != character:
        matched = fallback[matched - 1]
    return matched + 1 if pattern[matched] == character else 0
