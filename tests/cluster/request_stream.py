"""Back-to-back requests whose outputs must be exactly greedy."""

import random
import threading

from tandem.client import TandemClient
from tandem.v1 import inference_pb2 as pb
from tests.cluster.conftest import Oracle, random_ids, wait_until

_NUM_PROMPTS = 12
_END_S = 60.0


class RequestStream:
    """Sends requests until exit, which asserts that none failed or got wrong tokens."""

    def __init__(self, address: str, oracle: Oracle, *, num_threads: int = 3, max_tokens: int = 40) -> None:
        rng = random.Random(1)
        prompts = [random_ids(rng, rng.randint(5, 60)) for _ in range(_NUM_PROMPTS)]
        self._expected = [(prompt, oracle.generate(prompt, max_tokens)) for prompt in prompts]
        self._address = address
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(num_threads)]
        self.num_done = 0
        self.wrong: list[str] = []

    def __enter__(self) -> "RequestStream":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(_END_S)
        assert not any(thread.is_alive() for thread in self._threads), "a request hangs"
        assert self.wrong == []

    def stop(self) -> None:
        self._stop.set()

    def wait_more(self, num_requests: int, timeout_s: float = 60.0) -> None:
        until = self.num_done + num_requests
        wait_until(lambda: self.num_done >= until or self.wrong, timeout_s, "requests go on")
        assert self.wrong == []

    def _run(self, number: int) -> None:
        with TandemClient(self._address) as client:
            while not self._stop.is_set():
                prompt, expected = self._expected[number % _NUM_PROMPTS]
                number += 1
                sampling = pb.SamplingParams(max_tokens=self._max_tokens)
                request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
                try:
                    got = [token for r in client.generate(request, timeout_s=_END_S) for token in r.token_ids]
                except Exception as error:
                    self.wrong.append(f"{type(error).__name__}: {error}")
                    return
                if got != expected:
                    self.wrong.append(f"{got} in place of {expected}")
                    return
                self.num_done += 1
