"""A worker in virtual time: its prompts, its decode batch, its pool and its messages."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.elastic.attempts import TOKEN, Clients, Output, Port, Prompt
from benchmarks.elastic.batch import Batch
from benchmarks.elastic.chunks import Chunks
from benchmarks.elastic.events import Call, Events
from benchmarks.elastic.pages import PAGE_SIZE, Pages
from benchmarks.elastic.prompt_queue import PromptQueue
from benchmarks.elastic.reports import Reports, page_stats
from benchmarks.elastic.step_times import StepTimes
from tandem.messages import (
    Abort,
    Failed,
    Finished,
    FirstToken,
    GaveBack,
    LeaseLost,
    Prefill,
    RepeatPrefixes,
    RouterMessage,
)

LENGTH = "length"
# Weight of a step with prompts in the mean that heartbeats carry.
NEWS = 1 / 16


class Run(NamedTuple):
    """What a worker computes now.

    Attributes:
        num_steps: decode steps; 0: a forward pass without decoding.
        chunk: prompts and their tokens in it; then num_steps is at most 1.
    """

    began: float
    num_steps: int
    seconds: float
    chunk: Sequence[tuple[Prompt, int]]
    end: Call


class SimWorker:
    """
    Attributes:
        sends, receives: it computes prompts, and it decodes.
        peers: looks up a connected worker by id.
        reports: its streams to the routers.
    """

    def __init__(
        self,
        worker_id: str,
        role: str,
        events: Events,
        times: StepTimes,
        clients: Clients,
        peers: "Callable[[str], SimWorker | None]",
        *,
        itl_s: float,
        reports_prefixes: bool,
    ) -> None:
        """Args: itl_s: the ITL objective, which sizes chunks beside steps and counts slow gaps."""
        self.worker_id = worker_id
        self.sends = role != "decode"
        self.receives = role != "prefill"
        self.peers = peers
        self._events = events
        self._times = times
        self._clients = clients
        self._itl_s = itl_s
        self._pages = Pages(times.pool_tokens, reports=reports_prefixes)
        self.reports = Reports(self._pages)
        self._num_prompt_tokens = self._num_output_tokens = 0
        self._batch = Batch(times, itl_s)
        self._chunks = Chunks(times, itl_s)
        self._prompts = PromptQueue(lambda prompt: self._has_pages(prompt.output), self._start)
        # Attempts here by request id, as prefill and as decode worker.
        self._here: dict[str, Prompt] = {}
        self._outputs: dict[str, Output] = {}
        self._leases: deque[Output] = deque()
        self._ready: deque[Output] = deque()
        self._run: Run | None = None
        self._is_at_work = False
        self._is_dead = False
        self._linear = times.linear()
        self._gap_beside_s = 0.0

    # --- messages ---

    def receive(self, port: Port, messages: Sequence[RouterMessage]) -> None:
        if self._is_dead:
            return
        for message in messages:
            match message:
                case Prefill():
                    self._queue(port, message)
                case Abort():
                    self._abort(message)
                case RepeatPrefixes():
                    self.reports.repeat_prefixes(port)
        self._wake()

    def beat(self) -> None:
        """Sends a heartbeat to each router."""
        stats = replace(
            page_stats(self._pages),
            num_queued=self._prompts.num_queued + len(self._leases),
            num_running=len(self._batch) + self._prompts.num_started,
            prompt_tokens_computed=self._num_prompt_tokens,
            output_tokens_computed=self._num_output_tokens,
            num_queued_tokens=self._prompts.num_tokens,
            forward_times=replace(self._linear, gap_beside_prompts_s=self._gap_beside_s),
        )
        self.reports.beat(stats)

    # --- prompts ---

    def _queue(self, port: Port, message: Prefill) -> None:
        num_before = len(message.output_ids)
        num_left = message.sampling.max_tokens - num_before - 1
        num_tokens = len(message.prompt_ids) + num_before
        output = Output(
            port,
            message.request_id,
            message.attempt,
            self._clients.blocks_of(message.request_id),
            num_tokens,
            num_left,
            num_before + 1,
        )
        prompt = Prompt(output, message.decode_worker_id, num_tokens, num_left <= 0)
        self._here[message.request_id] = prompt
        self._prompts.add(prompt)

    def _has_pages(self, output: Output) -> bool:
        """Leaves a token for each running sequence."""
        pages = self._pages
        return pages.num_lacking(output.blocks, output.num_tokens) <= pages.num_free - len(self._batch)

    def _start(self, prompt: Prompt) -> None:
        """Locks a prompt's pages and asks for its lease."""
        output, pages = prompt.output, self._pages
        prompt.num_cached = prompt.num_done = min(pages.match(output.blocks), prompt.num_tokens - 1)
        pages.lock(output.blocks, prompt.num_tokens)
        prompt.is_started = True
        if prompt.decode_worker_id == self.worker_id:
            self._outputs[output.request_id] = output
            output.is_granted = True
        elif not prompt.is_last:
            decode = self.peers(prompt.decode_worker_id)
            if decode is None:
                # The router knows of the loss, or will at once.
                output.port.send(Failed(output.request_id, output.attempt, "the decode worker is gone"))
            else:
                output.on_granted = lambda: self._hand_over(prompt, decode)
                decode.ask_lease(output)

    def _compute(self, chunk: Sequence[tuple[Prompt, int]]) -> None:
        for prompt, size in chunk:
            self._num_prompt_tokens += size
            prompt.num_done += size
            if not prompt.is_over and prompt.num_done == prompt.num_tokens:
                self._end_prompt(prompt)

    def _end_prompt(self, prompt: Prompt) -> None:
        output = prompt.output
        self._prompts.remove(prompt)
        is_local = prompt.decode_worker_id == self.worker_id
        output.first_at = self._events.now
        if prompt.is_last or is_local:
            del self._here[output.request_id]
        if prompt.is_last:
            self._outputs.pop(output.request_id, None)
            self._unlock_prompt(prompt)
        self.reports.send_prefixes()
        reason = LENGTH if prompt.is_last else ""
        num_computed = (prompt.num_tokens - prompt.num_cached) // PAGE_SIZE
        output.port.send(
            FirstToken(
                output.request_id,
                output.attempt,
                output.next_index - 1,
                TOKEN,
                reason,
                prompt.num_cached,
                num_computed,
            )
        )
        self._clients.look(output.request_id)
        if prompt.is_last:
            return
        if is_local:
            self._ready.append(output)
        elif output.on_granted is not None:
            output.on_granted()

    def _hand_over(self, prompt: Prompt, decode: "SimWorker") -> None:
        """Called when the prompt is computed and when the lease is granted; acts at the later of the two."""
        output = prompt.output
        if output.first_at is None or not output.is_granted:
            return
        rest = min(self._times.chunk_size, prompt.num_tokens)

        def arrive() -> None:
            if not prompt.is_over:
                del self._here[output.request_id]
                self._unlock_prompt(prompt)
            self._wake()
            if not self._is_dead:
                decode.take_over(output)

        self._events.after(self._times.handover(rest), arrive)

    def _unlock_prompt(self, prompt: Prompt, *, keeps: bool = True) -> None:
        if prompt.is_started and not self._is_dead:
            prompt.is_started = False
            self._pages.unlock(prompt.output.blocks, prompt.num_tokens, keeps=keeps)
            self._grant()

    # --- decode ---

    def ask_lease(self, output: Output) -> None:
        self._outputs[output.request_id] = output
        self._leases.append(output)
        self._grant()

    def _grant(self) -> None:
        pages = self._pages
        while self._leases:
            output = self._leases[0]
            if not output.is_over:
                if not self._has_pages(output):
                    return
                pages.lock(output.blocks, output.num_tokens)
                output.is_granted = True
            self._leases.popleft()
            if not output.is_over and output.on_granted is not None:
                output.on_granted()

    def take_over(self, output: Output) -> None:
        if not self._is_dead and not output.is_over:
            self.reports.send_prefixes()
            self._ready.append(output)
            self._wake()

    def _join(self) -> None:
        while self._ready and len(self._batch) < self._times.max_batch_size:
            output = self._ready.popleft()
            if not output.is_over:
                self._batch.join(output)

    def _make_room(self) -> None:
        """Gives requests back until each running one can grow by a token, never the oldest."""
        while len(self._batch) > 1 and self._pages.num_free < len(self._batch):
            output = self._batch.youngest()
            self._send_decoded(output)
            self._drop_output(output)
            output.port.send(GaveBack(output.request_id, output.attempt))

    def _end_steps(self, num_steps: int, beside_s: float = 0.0) -> None:
        batch, now = self._batch, self._events.now
        size = len(batch)
        batch.pass_steps(num_steps, beside_s)
        self._pages.grow(num_steps * size)
        self._num_output_tokens += num_steps * size
        fresh, batch.fresh = batch.fresh, []
        for output in fresh:
            assert output.first_at is not None
            self._clients.count_gaps(output.request_id, 1, now - output.first_at > self._itl_s)
            output.counted_at, output.slow_before = batch.num_steps, batch.num_slow
            output.send_tokens(1)
        for output in batch.take_ended():
            self._send_decoded(output)
            self._drop_output(output)
            num_tokens = output.next_index
            output.port.send(Finished(output.request_id, output.attempt, LENGTH, num_tokens, 0, 0))
            self._clients.look(output.request_id)

    def _send_decoded(self, output: Output) -> None:
        """Sends a running output's tokens up to now."""
        batch = self._batch
        num_gaps = batch.num_steps - output.counted_at
        self._clients.count_gaps(output.request_id, num_gaps, batch.num_slow - output.slow_before)
        output.counted_at, output.slow_before = batch.num_steps, batch.num_slow
        output.send_tokens(num_gaps)

    def _drop_output(self, output: Output) -> None:
        output.is_over = True
        self._outputs.pop(output.request_id, None)
        num_tokens = output.num_tokens
        is_computed = output.first_at is not None
        if output.joined_at is not None:
            num_tokens += self._batch.leave(output)
        if output.is_granted:
            self._pages.unlock(output.blocks, num_tokens, keeps=is_computed)
            self._grant()

    # --- forward passes ---

    def _wake(self) -> None:
        """Composes the next forward pass as soon as none runs."""
        run = self._run
        if self._is_at_work or self._is_dead:
            return
        if run is None:
            self._is_at_work = True
            self._events.at(self._events.now, self._compose)
        elif run.num_steps > 1 and (self._prompts.num_queued or self._ready):
            # Something joins after the current step.
            num_steps = self._batch.steps_within(self._events.now - run.began) + 1
            if num_steps < run.num_steps:
                run.end.is_off = True
                seconds = self._batch.steps_s(num_steps)
                end = self._events.at(run.began + seconds, self._end_run)
                self._run = Run(run.began, num_steps, seconds, (), end)

    def _compose(self) -> None:
        self._is_at_work = True
        self._run = None
        if self._is_dead:
            return
        self._join()
        batch, now = self._batch, self._events.now
        self._make_room()
        chunk = self._prompts.choose_chunk(lambda num_before: self._chunks.size_beside(batch, num_before))
        size = len(batch)
        self._is_at_work = False
        if chunk:
            seconds = self._chunks.seconds(chunk, batch)
            num_steps = int(size > 0)
        elif size:
            num_steps = min(batch.steps_to_end(), max(1, self._pages.num_free // size))
            num_steps = 1 if batch.fresh else num_steps
            seconds = batch.steps_s(num_steps)
        else:
            return
        self._run = Run(now, num_steps, seconds, chunk, self._events.at(now + seconds, self._end_run))

    def _end_run(self) -> None:
        run = self._run
        assert run is not None
        self._is_at_work = True
        if run.num_steps:
            self._end_steps(run.num_steps, run.seconds if run.chunk else 0.0)
            if run.chunk:
                self._gap_beside_s += NEWS * (run.seconds - self._gap_beside_s)
        self._compute(run.chunk)
        self._compose()

    # --- ends ---

    def _abort(self, message: Abort) -> None:
        prompt = self._here.get(message.request_id)
        if prompt is not None and prompt.output.attempt == message.attempt:
            self._drop_prompt(prompt)
        output = self._outputs.get(message.request_id)
        if output is not None and output.attempt == message.attempt:
            self._drop_output(output)

    def _drop_prompt(self, prompt: Prompt) -> None:
        prompt.is_over = True
        self._here.pop(prompt.output.request_id, None)
        self._prompts.remove(prompt)
        if prompt.decode_worker_id != self.worker_id:
            self._unlock_prompt(prompt, keeps=prompt.output.first_at is not None)

    def die(self) -> None:
        """Ends at once. What it had decoded so far is at the routers, as from real workers."""
        run = self._run
        self._is_at_work = True
        if run is not None and run.num_steps and not run.chunk:
            done = min(run.num_steps, self._batch.steps_within(self._events.now - run.began))
            if done:
                self._end_steps(done)
        for output in self._batch:
            if output not in self._batch.fresh:
                self._send_decoded(output)
        self._is_dead = True
        if run is not None:
            run.end.is_off = True

    def tell_receivers(self) -> None:
        """Has decode workers report the leases that this worker's death has ended. Call it after the routers have
        lost it."""
        for prompt in self._here.values():
            output = prompt.output
            decode = self.peers(prompt.decode_worker_id)
            if decode is not None and decode is not self and not output.is_over:
                decode.lose_lease(output)

    def lose_lease(self, output: Output) -> None:
        if not self._is_dead and output.request_id in self._outputs:
            self._drop_output(output)
            output.port.send(LeaseLost(output.request_id, output.attempt))
            self._wake()
