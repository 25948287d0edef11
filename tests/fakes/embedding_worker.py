"""A prefill worker in the router's registry that answers each prompt to embed with its first and last token."""

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

from tandem.messages import Embedded, Prefill
from tandem.router.router import Router
from tests.fakes.scripted_worker import ScriptedWorker


def values_of(prompt_ids: Sequence[int]) -> list[float]:
    return [float(len(prompt_ids)), float(prompt_ids[0]), float(prompt_ids[-1])]


class EmbeddingWorker(ScriptedWorker):
    """
    Attributes:
        answers: False to leave prompts unanswered until `answer_all`.
        most_in_flight: maximum of unanswered prompts.
    """

    def __init__(self, router: Router, worker_id: str = "p0", *, answers: bool = True) -> None:
        self.answers = answers
        self.most_in_flight = 0
        self._unanswered: list[Prefill] = []
        super().__init__(router, worker_id, "prefill")

    def _send(self, messages: Sequence[Any]) -> None:
        super()._send(messages)
        prompts = [m for m in messages if isinstance(m, Prefill)]
        self._unanswered += prompts
        self.most_in_flight = max(self.most_in_flight, len(self._unanswered))
        if prompts and self.answers:
            # Later, as over a socket.
            asyncio.get_running_loop().call_later(0, self.answer_all)

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [prefill.prompt_ids for prefill in self.of(Prefill)]

    def answer_all(self) -> None:
        answered, self._unanswered = self._unanswered, []
        for prefill in answered:
            values = array("f", values_of(prefill.prompt_ids)).tobytes()
            self.say(Embedded(prefill.request_id, prefill.attempt, values, min(1, len(prefill.prompt_ids) - 1), 1))
