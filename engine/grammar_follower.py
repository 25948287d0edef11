"""Follows the outputs of earlier attempts through their grammars, beside the engine thread.

A new attempt starts with all tokens so far. Each was sampled under a mask. So each is consumed after its mask, within
the limits of masks: making a mask parses every token that it allows. A turn ends after SLICE_S, so several outputs
advance together. The GIL is free during masks, and during tokens that cost more than CHEAP_S.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

import numpy as np
from llguidance import LLExecutor, LLMatcher

from tandem.grammar_limits import MAX_MASK_CPU_S, TOO_COSTLY, one_line

NUM_THREADS = 2
# Turn of one output, in seconds.
SLICE_S = 0.01
# Limit for one output's masks, in seconds of a processor. Typical ones take 10 us a token.
MAX_CPU_S = 20.0
# Consuming a token without the GIL takes 40 us longer.
CHEAP_S = 0.0003
LEFT = "the output has left the grammar"


class Begun(Protocol):
    """The follower's view of a constraint."""

    @property
    def compiled_matcher(self) -> "Future[LLMatcher]": ...

    @property
    def matcher(self) -> LLMatcher: ...

    def caught_up(self, num_tokens: int, error: str, *, may_do_better: bool = True) -> None: ...


class ParallelMatchers:
    """Consumes tokens of several matchers at once, without the GIL."""

    def __init__(self, num_threads: int, idle: LLMatcher) -> None:
        """Args: idle: any matcher that nobody else uses."""
        self._executor = LLExecutor(num_threads)
        self._idle = idle

    def consume(self, matchers: Sequence[tuple[LLMatcher, int]]) -> list[bool]:
        # With one matcher alone, llguidance keeps the GIL.
        return self._executor.consume_token_par([*matchers, (self._idle, 0)])[:-1]


class GrammarFollower:
    def __init__(self, new_idle: Callable[[], LLMatcher], num_words: int) -> None:
        """Args: num_words: length of a mask in 32-bit words."""
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammar-follower")
        self._new_idle = new_idle
        self._num_words = num_words

    def begin(self, constraint: Begun, output_ids: Sequence[int]) -> None:
        """Follows `output_ids` once the grammar is compiled, and then calls `caught_up`. Ends early if nobody refers to
        the constraint any more."""
        following = _Following(weakref.ref(constraint), output_ids, self._new_idle, self._num_words)

        def submit(_: object = None) -> None:
            # Refused after `close`.
            with suppress(RuntimeError):
                self._threads.submit(take_turn)

        def take_turn() -> None:
            if following.advance():
                submit()

        constraint.compiled_matcher.add_done_callback(submit)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Following:
    """One output on its way through its grammar."""

    def __init__(
        self,
        constraint: "weakref.ref[Begun]",
        output_ids: Sequence[int],
        new_idle: Callable[[], LLMatcher],
        num_words: int,
    ) -> None:
        self._constraint = constraint
        self._output_ids = output_ids
        self._new_idle = new_idle
        self._mask = np.zeros(num_words, dtype=np.int32)
        self._parallel: ParallelMatchers | None = None
        self._num_followed = 0
        self._cpu_s = self._mask_s = 0.0

    def advance(self) -> bool:
        """Takes a turn. Returns whether tokens are left."""
        constraint = self._constraint()
        if constraint is None:
            return False
        if constraint.compiled_matcher.exception() is not None:
            constraint.caught_up(0, "")
            return False
        began, end = time.thread_time(), time.monotonic() + SLICE_S
        error, may_do_better = "", True
        try:
            matcher = constraint.matcher
            while not error and self._num_followed < len(self._output_ids) and time.monotonic() < end:
                error = self._follow_one(matcher, self._output_ids[self._num_followed])
                self._num_followed += 1
        except Exception as failure:
            error = one_line(str(failure)) or repr(failure)
        self._cpu_s += time.thread_time() - began
        is_left = self._num_followed < len(self._output_ids)
        if is_left and not error and self._cpu_s > MAX_CPU_S:
            error = (
                f"its {len(self._output_ids)} tokens so far take more than {MAX_CPU_S:g} s to follow; make the grammar "
                "simpler"
            )
            may_do_better = False
        if error or not is_left:
            may_do_better = may_do_better and error != TOO_COSTLY
            constraint.caught_up(self._num_followed, error, may_do_better=may_do_better)
            return False
        return True

    def _follow_one(self, matcher: LLMatcher, token_id: int) -> str:
        """Returns an error or ""."""
        began = time.thread_time()
        matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if matcher.is_error():
            return one_line(matcher.get_error())
        if not self._mask.view(np.uint8)[token_id // 8] >> token_id % 8 & 1:
            return LEFT
        before, self._mask_s = self._mask_s, time.thread_time() - began
        if min(before, self._mask_s) > MAX_MASK_CPU_S:
            return TOO_COSTLY
        if self._mask_s < CHEAP_S:
            is_consumed = matcher.consume_token(token_id)
        else:
            if self._parallel is None:
                self._parallel = ParallelMatchers(1, self._new_idle())
            [is_consumed] = self._parallel.consume([(matcher, token_id)])
        return "" if is_consumed else one_line(matcher.get_error()) or LEFT
