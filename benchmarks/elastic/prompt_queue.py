"""Prompts of a simulated worker: queued ones by arrival, and started ones, which have pages."""

from collections import deque
from collections.abc import Callable

from benchmarks.elastic.attempts import Prompt


class PromptQueue:
    def __init__(self, has_pages: Callable[[Prompt], bool], start: Callable[[Prompt], None]) -> None:
        """Args: start: locks a prompt's pages; it may end the prompt at once."""
        self._has_pages = has_pages
        self._start = start
        self._queued: deque[Prompt] = deque()
        self._started: list[Prompt] = []

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    @property
    def num_started(self) -> int:
        return len(self._started)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return sum(prompt.num_tokens - prompt.num_done for prompt in (*self._started, *self._queued))

    def add(self, prompt: Prompt) -> None:
        self._queued.append(prompt)

    def remove(self, prompt: Prompt) -> None:
        if prompt in self._started:
            self._started.remove(prompt)
        elif prompt in self._queued:
            self._queued.remove(prompt)

    def choose_chunk(self, size_behind: Callable[[int], int]) -> list[tuple[Prompt, int]]:
        """Returns prompts and tokens to compute next: started prompts first, then queued ones as their pages fit.

        Args:
            size_behind: returns the tokens of the chunk, by those before it in its first prompt.
        """
        chunk: list[tuple[Prompt, int]] = []
        left = -1
        place = 0
        while left and (place < len(self._started) or self._queued):
            if place == len(self._started):
                prompt = self._queued[0]
                if not self._has_pages(prompt):
                    break
                self._queued.popleft()
                self._start(prompt)
                if prompt.is_over:
                    continue
                self._started.append(prompt)
            prompt = self._started[place]
            place += 1
            if left < 0:
                left = size_behind(prompt.num_done)
            size = min(left, prompt.num_tokens - prompt.num_done)
            chunk.append((prompt, size))
            left -= size
        return chunk
