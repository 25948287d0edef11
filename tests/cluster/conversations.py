"""Conversations of several turns over a small pool, and their tokens by the tier that held them."""

import itertools
import os
import random
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
import ray

from tandem.client import TandemClient
from tandem.v1 import inference_pb2 as pb
from tests.cluster.conftest import RESTART_S, Answer, Oracle, ServedCluster, random_ids, wait_until
from tests.cluster.test_page_store import STORE, pid_of, store_metrics

# Includes a worker's restart.
TIMEOUT_S = 90.0
QUESTION_TOKENS = (8, 24)
OUTPUT_TOKENS = (4, 12)


@dataclass
class Hits:
    """Prompt tokens of some requests, by the tier that held them."""

    prompt: int = 0
    pool: int = 0
    host: int = 0
    disk: int = 0

    @property
    def share(self) -> float:
        """Share of the prompts that the store held."""
        return (self.host + self.disk) / self.prompt

    @classmethod
    def of(cls, usage: pb.Usage) -> "Hits":
        stored = usage.host_tokens + usage.disk_tokens
        return cls(usage.prompt_tokens, usage.cached_tokens - stored, usage.host_tokens, usage.disk_tokens)

    def __add__(self, other: "Hits") -> "Hits":
        return Hits(self.prompt + other.prompt, self.pool + other.pool, self.host + other.host, self.disk + other.disk)


@dataclass
class Conversation:
    """
    Attributes:
        token_ids: all of its tokens so far.
        answers: prompt and output of each turn.
    """

    rng: random.Random
    token_ids: list[int] = field(default_factory=list)
    answers: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def question(self, num_tokens: int) -> list[int]:
        """Add a question; return the turn's prompt."""
        self.token_ids += random_ids(self.rng, num_tokens)
        return list(self.token_ids)

    def add(self, prompt_ids: list[int], answer: Answer) -> None:
        self.answers.append((prompt_ids, answer.token_ids))
        self.token_ids += answer.token_ids


class Conversations:
    def __init__(self, seed: int, num_conversations: int, num_first_tokens: tuple[int, int], num_threads: int) -> None:
        """Args: num_first_tokens: bounds of the first questions' lengths."""
        self.conversations = [Conversation(random.Random(f"{seed} {n}")) for n in range(num_conversations)]
        self._num_first_tokens = num_first_tokens
        self._num_threads = num_threads

    def turn(
        self,
        served: ServedCluster,
        kills: Mapping[int, Sequence[str]] | None = None,
        client: TandemClient | None = None,
    ) -> Hits:
        """Give every conversation a turn, in another order each time. Return the sum of their hits.

        Args:
            kills: processes to kill when so many requests of the turn have been sent.
        """
        order = list(self.conversations)
        random.Random(len(order[0].answers)).shuffle(order)
        num_sent = itertools.count(1)

        def serve(conversation: Conversation) -> Hits:
            for name in (kills or {}).get(next(num_sent), ()):
                kill(served, name)
            return self._turn_of(conversation, served, client or served.client)

        with ThreadPoolExecutor(self._num_threads) as threads:
            return sum(threads.map(serve, order), Hits())

    def assert_greedy(self, oracle: Oracle) -> None:
        """All answers of a conversation are part of its tokens, so one forward pass has the best tokens of all."""
        for conversation in self.conversations:
            best = oracle.logits(conversation.token_ids).argmax(-1).tolist()
            for prompt_ids, output_ids in conversation.answers:
                start = len(prompt_ids) - 1
                assert best[start : start + len(output_ids)] == output_ids

    def _turn_of(self, conversation: Conversation, served: ServedCluster, client: TandemClient) -> Hits:
        rng = conversation.rng
        bounds = QUESTION_TOKENS if conversation.answers else self._num_first_tokens
        prompt_ids, max_tokens = conversation.question(rng.randint(*bounds)), rng.randint(*OUTPUT_TOKENS)
        answer = Answer()
        request = served.request(prompt_ids, max_tokens=max_tokens, ignore_eos=True)
        for response in client.generate(request, timeout_s=TIMEOUT_S):
            answer.add(response)
        assert len(answer.token_ids) == max_tokens
        conversation.add(prompt_ids, answer)
        return Hits.of(answer.last.usage)


def wait_store(served: ServedCluster) -> None:
    """Wait until all workers have a session with the store, and its disk has every page that its memory has."""

    def is_up() -> bool:
        with suppress(grpc.RpcError, ray.exceptions.RayError):
            metrics = store_metrics(served)
            is_idle = metrics.get("disk_queue_pages") == metrics.get("slots.writing") == 0
            return is_idle and metrics["sessions"] == len(served.client.server_info().workers)
        return False

    wait_until(is_up, RESTART_S, "the store is back, with all workers")


def load_at_any_cost(served: ServedCluster) -> None:
    """Make the workers of now load what the store has, even from a disk that is slower than computing."""

    def patch(actor: object) -> None:
        from tandem.pagestore.client import node_store

        node_store.expected_compute_s = lambda *_: float("inf")

    for worker in served.client.server_info().workers:
        ray.get(served.cluster.actor(worker.worker_id).__ray_call__.remote(patch))


def kill(served: ServedCluster, name: str) -> None:
    """Kill a worker or the store by its name, once it runs."""

    def pid() -> int:
        if name == STORE:
            with suppress(ray.exceptions.RayError):
                return pid_of(served, name)
        worker = served.worker(name)
        return worker.pid if worker is not None and worker.alive else 0

    os.kill(wait_until(pid, RESTART_S, f"{name} runs"), signal.SIGKILL)
