"""Prompts and outputs of fixed or random lengths, alone or in conversations."""

import random
from dataclasses import dataclass

from tandem.bench.workloads.base import PromptPart, Session, Turn, Workload, numbered
from tandem.bench.workloads.prompts import PromptMaker


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniformly distributed numbers of tokens, bounds included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"lengths go from 1 up, not from {self.low} to {self.high}")

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


class Synthetic(Workload):
    def __init__(
        self,
        make: PromptMaker,
        seed: int,
        num_sessions: int,
        input_lengths: Lengths,
        output_lengths: Lengths,
        *,
        num_system_tokens: int = 0,
        num_document_tokens: int = 0,
        num_turns: int = 1,
        think_s: float = 0.0,
    ) -> None:
        """
        Args:
            input_lengths: tokens that a turn adds to the prompt, without the system prompt.
            num_system_tokens: length of the system prompt of all sessions.
            num_document_tokens: tokens before the first question, of each session its own.
        """
        self._make = make
        self._seed = seed
        self._num_sessions = num_sessions
        self._input_lengths = input_lengths
        self._output_lengths = output_lengths
        self._num_system_tokens = num_system_tokens
        self._num_document_tokens = num_document_tokens
        self._num_turns = num_turns
        self._think_s = think_s

    def sessions(self) -> list[Session]:
        rng = random.Random(f"{self._seed}/lengths")
        system = self._system()
        return numbered([self._turns(number, rng, system) for number in range(self._num_sessions)])

    def _system(self) -> tuple[PromptPart, ...]:
        return (self._make.part("system", self._num_system_tokens, "system"),) if self._num_system_tokens else ()

    def _turns(self, number: int, rng: random.Random, system: tuple[PromptPart, ...]) -> list[Turn]:
        turns = []
        for turn in range(self._num_turns):
            num_input, num_output = self._input_lengths.draw(rng), self._output_lengths.draw(rng)
            num_input += 0 if turn else self._num_document_tokens
            question = self._make.part("user", num_input, f"{number}/{turn}")
            is_last = turn == self._num_turns - 1
            stand_in = None if is_last else self._make.part("assistant", num_output, f"{number}/{turn}/answer")
            parts = question if turn else (*system, question)
            parts = parts if isinstance(parts, tuple) else (parts,)
            turns.append(Turn(parts, num_output, stand_in, self._think_s if turn else 0.0))
        return turns
