"""How fast the workers are, as the router has seen it: what placements are reckoned with.

Nothing is asked of a worker for this. When a prompt began and when its first token was sampled stands in what it says
of each request anyway, on its own clock; how long its steps take is the time between two messages of tokens. Each
router sees its own requests alone; of what others have a worker do it knows the numbers, which are the other side of
each fit.
"""

from dataclasses import dataclass, field
from typing import Protocol

from tandem.lifecycle import DECODE_STARTED, FIRST_TOKEN
from tandem.linear_fit import LinearFit

# Two first tokens that are no further apart are of one forward.
SAME_FORWARD_S = 0.0005
# Steps are looked at together for so long: a look takes some microseconds.
SAMPLE_S = 0.02
# So many of these make something new to reckon with.
LOOKS_PER_NUMBER = 8
# Share of each new observation in a mean that is kept.
NEWS = 1 / 16


@dataclass(frozen=True, slots=True)
class StartRates:
    """What is supposed of a kind of device before anything has been observed, in seconds. These are of an H200 with a
    model of 8 billion parameters, and of two CPU cores with one of 135 million.

    Attributes:
        prompt: a prefill, and each prompt token of it.
        step: a decode step, each request in it, and each token of their KV.
        handover: from a first token to the step of the second at another worker, and each page that is shipped.
    """

    prompt: tuple[float, float]
    step: tuple[float, float, float]
    handover: tuple[float, float]


START_RATES = {
    "cuda": StartRates((5e-3, 25e-6), (4.5e-3, 30e-6, 2e-8), (8e-3, 6e-6)),
    "cpu": StartRates((20e-3, 2e-3), (25e-3, 4e-3, 1e-6), (15e-3, 1e-4)),
}


class FinishedRequest(Protocol):
    """What is known of a request that has ended; a RequestTracker is one."""

    @property
    def moments(self) -> dict[str, int]: ...

    @property
    def num_pages_shipped(self) -> int: ...

    @property
    def output_ids(self) -> list[int]: ...


class SharedRates:
    """What is the same for all workers of a cluster.

    Attributes:
        mean_output_tokens: of requests that were finished.
    """

    def __init__(self, device: str) -> None:
        self._handover = LinearFit(_start_rates(device).handover)
        self.mean_output_tokens = 128.0

    @property
    def handover_s(self) -> tuple[float, float]:
        """Seconds of a handover to another worker: of each, and of each page that is shipped."""
        fixed, page = self._handover.factors
        return fixed, page

    def request_finished(self, request: FinishedRequest, *, is_apart: bool) -> None:
        """Args: is_apart: whether one worker has computed the prompt and another one has decoded."""
        self.mean_output_tokens += NEWS * (len(request.output_ids) - self.mean_output_tokens)
        first, second = request.moments.get(FIRST_TOKEN), request.moments.get(DECODE_STARTED)
        if is_apart and first is not None and second is not None:
            self._handover.observe((1.0, request.num_pages_shipped), max(0, second - first) / 1e9)


@dataclass(slots=True)
class WorkerRates:
    """Those of one worker.

    Attributes:
        shared: those of all workers.
        number: goes up when something has been learned.
        prompt_gap_s: mean time between steps while prompts are computed too; 0: not known.
    """

    device: str
    shared: SharedRates
    number: int = 0
    prompt_gap_s: float = 0.0
    _prompt: LinearFit = field(init=False)
    _step: LinearFit = field(init=False)
    _last_done_ns: int = 0
    # Of the last forward that has given first tokens, which more may follow of.
    _open_tokens: int = 0
    _open_s: float = 0.0
    # Since when nothing but steps has happened at the worker, how many have ended, and what was under way then.
    _steps_since: float = 0.0
    _num_steps: int = 0
    _load_number: int = -1
    _num_looks: int = 0

    def __post_init__(self) -> None:
        start = _start_rates(self.device)
        self._prompt = LinearFit(start.prompt)
        self._step = LinearFit(start.step)

    @property
    def prompt_s(self) -> tuple[float, float]:
        """Seconds of a prefill, and of each prompt token in it."""
        fixed, token = self._prompt.factors
        return fixed, token

    @property
    def step_s(self) -> tuple[float, float, float]:
        """Seconds of a decode step, of each request in it, and of each token of their KV."""
        fixed, request, token = self._step.factors
        return fixed, request, token

    def begin_like(self, other: "WorkerRates") -> None:
        """A worker that has just joined is as fast as another of its kind, as far as anybody knows."""
        self._prompt, self._step = other._prompt.copy(), other._step.copy()

    def prompt_computed(self, num_tokens: int, started_ns: int, done_ns: int) -> None:
        """A first token has been sampled.

        Args:
            num_tokens: that were computed for it.
            started_ns, done_ns: on the worker's clock: when its prefill began, and when the token was there. What was
                under way before it began is not its own time.
        """
        seconds = (done_ns - max(started_ns, self._last_done_ns)) / 1e9
        self._last_done_ns = max(self._last_done_ns, done_ns)
        if seconds > SAME_FORWARD_S:
            if self._open_s > 0:
                self._prompt.observe((1.0, self._open_tokens), self._open_s)
                self.number += 1
            self._open_tokens, self._open_s = 0, 0.0
        self._open_tokens += num_tokens
        self._open_s += max(0.0, seconds)

    def tokens_came(
        self, now: float, load_number: int, num_requests: int, num_kv_tokens: int, num_prompt_tokens: int
    ) -> None:
        """A step has ended.

        Args:
            now: on the router's clock.
            load_number: of what is under way at the worker: steps between which it has changed are not alike.
            num_requests, num_kv_tokens: that it decodes.
            num_prompt_tokens: that it has yet to compute.
        """
        if load_number != self._load_number or not num_requests:
            self._steps_since, self._num_steps, self._load_number = now, 0, load_number
            return
        self._num_steps += 1
        elapsed_s = now - self._steps_since
        if elapsed_s < SAMPLE_S:
            # Messages may come several at once: their mean is right.
            return
        gap_s = elapsed_s / self._num_steps
        self._steps_since, self._num_steps = now, 0
        if num_prompt_tokens:
            news = NEWS if self.prompt_gap_s else 1.0
            self.prompt_gap_s += news * (gap_s - self.prompt_gap_s)
        else:
            self._step.observe((1.0, num_requests, num_kv_tokens), gap_s)
        self._num_looks += 1
        if self._num_looks % LOOKS_PER_NUMBER == 1:
            self.number += 1


def _start_rates(device: str) -> StartRates:
    return START_RATES["cuda" if device.startswith("cuda") else "cpu"]
