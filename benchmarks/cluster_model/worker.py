"""A worker in virtual time: its forwards take what a device takes, and are composed as the real schedulers do it."""

from array import array
from collections import deque
from collections.abc import Callable
from typing import Protocol

from benchmarks.cluster_model.device import DeviceFactors
from benchmarks.cluster_model.events import EventQueue
from benchmarks.cluster_model.jobs import Job
from benchmarks.cluster_model.prefix_cache import PrefixCache
from tandem.engine.mixed_graphs import MixedSizes
from tandem.engine.mixed_sizes import NUM_PROMPT_TOKENS
from tandem.prefill_worker.budget import PromptBudget, PromptRest
from tandem.worker.forward_timer import ForwardTimer

PAGE_SIZE = 16
# So many prompts are in one forward at most, and so many requests in one step.
MAX_PROMPTS = 64
MAX_BATCH = 256
# Where nothing is decoded, one forward is launched behind the one that runs.
MAX_LAUNCHED = 2
# Forwards that decode and compute prompts are graphs of these sizes, and what is padding is computed too.
MIXED_SIZES = MixedSizes.up_to(MAX_BATCH, NUM_PROMPT_TOKENS[-1])


class WorkerListener(Protocol):
    """Who hears of what a worker has done, at the moment when it has."""

    def first_token(self, worker: "ModelWorker", job: Job) -> None: ...

    def step_ended(self, worker: "ModelWorker", started: list[Job], finished: list[Job]) -> None:
        """Args: started: those whose second token the step gave."""


class ModelWorker:
    """First come, first served. A worker that decodes computes as much of prompts as the budget has it with each decode
    step: in one forward, or, where the device has no such, in one before the step. A worker that decodes nothing
    computes prompts one forward behind the other.

    Requests get memory for prompt and output when they join the running ones, in order, and wait for it before that;
    prompts wait for none.
    """

    def __init__(
        self,
        queue: EventQueue,
        device: DeviceFactors,
        budget: PromptBudget,
        timer: ForwardTimer,
        cache: PrefixCache,
        listener: WorkerListener,
    ) -> None:
        self._queue = queue
        self._device = device
        self._budget = budget
        self.timer = timer
        self._cache = cache
        self._listener = listener
        self._prompts: deque[Job] = deque()
        self._num_launched = 0
        self._device_free_at = 0.0
        # Those that wait to join the running ones, and the running ones by the number of their last step.
        self._joining: deque[Job] = deque()
        self._ends: dict[int, list[Job]] = {}
        self._started: list[Job] = []
        self._num_running = 0
        self._num_kv_tokens = 0
        self._num_reserved = 0
        self._in_turn = False
        self.step_times: array[float] = array("d")

    def submit(self, job: Job) -> None:
        """A prompt to compute."""
        self._prompts.append(job)
        self._go_on()

    def adopt(self, job: Job) -> None:
        """A request to decode, whose KV is here."""
        job.adopted_at = self._queue.now
        self._joining.append(job)
        self._cache.use(job.identities[: job.num_prompt // PAGE_SIZE])
        self._go_on()

    @property
    def num_locked_pages(self) -> int:
        """Of its pool, by the requests that run."""
        return -(-self._num_reserved // PAGE_SIZE)

    def num_cached_pages(self, job: Job) -> int:
        """Of a job's prompt."""
        return self._cache.num_cached(job.identities[: job.num_prompt // PAGE_SIZE])

    def _go_on(self) -> None:
        if self._in_turn:
            return
        self._join()
        if self._num_running:
            if not self._num_launched:
                self._begin_turn()
            return
        self.timer.nothing_decoded()
        while self._num_launched < MAX_LAUNCHED and not self._is_handing_over and (piece := self._compose()):
            self._launch(piece, self._prompts_computed)

    @property
    def _is_handing_over(self) -> bool:
        """Whether what runs hands over to this worker itself, which decodes that before it launches the next one."""
        if not self._prompts or not self._num_launched:
            return False
        return self._prompts[0].continues_here and self._prompts[0].launched == self._prompts[0].num_prompt

    def _compose(self) -> list[tuple[Job, int]]:
        """The prompts of the next forward and how many tokens of each."""
        first = next((job for job in self._prompts if job.launched < job.num_prompt), None)
        if first is None:
            return []
        next_one = first
        left = self._budget.num_tokens(lambda: self._rest_of(next_one))
        piece: list[tuple[Job, int]] = []
        for job in self._prompts:
            if left <= 0 or len(piece) == MAX_PROMPTS:
                break
            if job.started_at < 0:
                self._start(job)
            if num_tokens := min(left, job.num_prompt - job.launched):
                piece.append((job, num_tokens))
                left -= num_tokens
        return piece

    def _start(self, job: Job) -> None:
        job.found_cached = job.computed = job.launched = self._num_before(job)
        job.started_at = self._queue.now

    def _num_before(self, job: Job) -> int:
        """Tokens of a prompt that are computed, or would be found cached if it began now."""
        if job.started_at >= 0:
            return job.launched
        return min(PAGE_SIZE * self.num_cached_pages(job), job.num_prompt - 1)

    def _rest_of(self, job: Job) -> PromptRest:
        num_before = self._num_before(job)
        return PromptRest(num_before, job.num_prompt - num_before)

    def _launch(self, piece: list[tuple[Job, int]], then: Callable[[list[tuple[Job, int]]], None]) -> None:
        num_tokens, num_attended = self._note_launched(piece)
        begins = max(self._queue.now, self._device_free_at)
        self._device_free_at = begins + self._device.prompt_s(num_tokens, num_attended)
        self._queue.after(self._device_free_at - self._queue.now, lambda: then(piece))

    def _note_launched(self, piece: list[tuple[Job, int]]) -> tuple[int, int]:
        """Returns the tokens of these prompts, and how many these attend to."""
        num_tokens = sum(count for _, count in piece)
        num_attended = sum(count * job.launched + count * count // 2 for job, count in piece)
        for job, count in piece:
            job.launched += count
        self.timer.prompts_launched(self._queue.now, num_tokens, num_attended)
        self._num_launched += 1
        return num_tokens, num_attended

    def _prompts_computed(self, piece: list[tuple[Job, int]]) -> None:
        self._take(piece)
        self._go_on()

    def _take(self, piece: list[tuple[Job, int]], *, is_mixed: bool = False) -> None:
        """What a forward of prompts has given. Args: is_mixed: it was a decode step too, of which the timer knows."""
        self._num_launched -= 1
        self.timer.prompts_ended(is_mixed=is_mixed)
        for job, count in piece:
            job.computed += count
        for job in [job for job, _ in piece if job.computed == job.num_prompt]:
            self._prompts.remove(job)
            job.first_token_at = self._queue.now
            self._cache.use(job.identities[: job.num_prompt // PAGE_SIZE])
            self._listener.first_token(self, job)
            if job.continues_here and job.num_output > 1:
                self._joining.append(job)

    def _join(self) -> None:
        while self._joining and self._num_running < MAX_BATCH:
            job = self._joining[0]
            size = job.num_prompt + job.num_output
            if self._num_reserved + size > self._device.pool_tokens:
                return
            self._joining.popleft()
            self._num_reserved += size
            self._num_running += 1
            self._num_kv_tokens += job.num_prompt + 1
            job.first_step, job.step_times = len(self.step_times), self.step_times
            self._ends.setdefault(job.first_step + job.num_output - 2, []).append(job)
            self._started.append(job)

    def _begin_turn(self) -> None:
        self._in_turn = True
        piece = self._compose()
        if not piece:
            self._launch_step()
        elif self._device.mixed is None:
            self._launch(piece, self._launch_step_behind)
        else:
            self._launch_mixed(piece)

    def _launch_mixed(self, piece: list[tuple[Job, int]]) -> None:
        num_tokens, num_attended = self._note_launched(piece)
        self.timer.step_launched(self._num_running, self._num_kv_tokens)
        if graph := MIXED_SIZES.smallest(self._num_running, num_tokens):
            num_tokens = graph[1]
        took_s = self._device.mixed_s(num_tokens, num_attended, self._num_running, self._num_kv_tokens)
        self._queue.after(took_s, lambda: self._step_ended(piece))

    def _launch_step_behind(self, piece: list[tuple[Job, int]]) -> None:
        self._take(piece)
        self._join()
        self._launch_step()

    def _launch_step(self) -> None:
        self.timer.step_launched(self._num_running, self._num_kv_tokens)
        self._queue.after(self._device.step_s(self._num_running, self._num_kv_tokens), self._step_ended)

    def _step_ended(self, piece: list[tuple[Job, int]] | None = None) -> None:
        """Args: piece: the prompts that were in one forward with it."""
        self.timer.step_ended()
        number = len(self.step_times)
        self.step_times.append(self._queue.now)
        self._num_kv_tokens += self._num_running
        finished = self._ends.pop(number, [])
        for job in finished:
            self._num_running -= 1
            self._num_kv_tokens -= job.num_prompt + job.num_output
            self._num_reserved -= job.num_prompt + job.num_output
            self._cache.use(job.identities[: (job.num_prompt + job.num_output - 1) // PAGE_SIZE])
        started, self._started = self._started, []
        if piece is not None:
            self._take(piece, is_mixed=True)
        self._in_turn = False
        self._device_free_at = self._queue.now
        self._listener.step_ended(self, started, finished)
        self._go_on()
