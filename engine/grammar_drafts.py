"""Grammars of drafts.

Drafts have a matcher of their own, of a grammar that is compiled apart: matchers of one compiled grammar share
llguidance's limits, and a matcher that fails stays failed. So drafts never cost a request its output.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher

from tandem.engine.grammar_compilers import CompiledGrammar

# For the output that is new, and for the masks of a check, in seconds of a processor. A token takes about 10 us, a mask
# mostly less than 100 us. The output is followed over several steps; drafting ends at the second check in a row whose
# masks take longer.
MAX_CPU_S = 0.005

Mask = np.ndarray[Any, np.dtype[np.int32]]


class DraftMatcher:
    """Follows one request's output, and checks drafts behind it.

    Attributes:
        has_failed: no draft will pass any more.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        eos_ids: Sequence[int],
        num_words: int,
        drop: Callable[[CompiledGrammar], None],
    ) -> None:
        """
        Args:
            num_words: length of a mask in 32-bit words.
            drop: called if the grammar's limits are used up, so that later requests get another one.
        """
        self._compiled = compiled
        self._drop = drop
        self._eos_ids = eos_ids
        self._num_words = num_words
        self._own: LLMatcher | None = None
        self._num_followed = 0
        self._last_check_s = 0.0
        self.has_failed = False

    @property
    def may_pass(self) -> bool:
        """Returns whether a check may let drafts pass: the grammar is compiled and nothing has failed."""
        return not self.has_failed and self._compiled.matcher.done()

    def check(self, output_ids: Sequence[int], draft_ids: Sequence[int], end_ids: Sequence[int]) -> list[Mask]:
        """Returns, for each draft up to the first that the grammar forbids, the tokens that may follow it.

        The drafts do not count as output. While the grammar is compiled or the output followed, no draft passes.

        Args:
            output_ids: output so far, over all attempts.
            end_ids: tokens that may end the output.
        """
        if not self.may_pass:
            return []
        if self._compiled.matcher.exception() is not None:
            self.has_failed = True
            return []
        if self._own is None:
            self._own = self._compiled.new_user()
        if not self._follow(self._own, output_ids):
            return []
        began = time.thread_time()
        masks = self._masks(self._own, draft_ids, end_ids, began)
        before, self._last_check_s = self._last_check_s, time.thread_time() - began
        if self._own.is_error():
            self._fail(self._own)
        elif min(before, self._last_check_s) > MAX_CPU_S:
            self.has_failed = True
        return masks

    def _fail(self, matcher: LLMatcher) -> None:
        self.has_failed = True
        if matcher.is_error():
            self._drop(self._compiled)

    def _follow(self, matcher: LLMatcher, output_ids: Sequence[int]) -> bool:
        """Returns whether the matcher has consumed all output."""
        began = time.thread_time()
        for token_id in output_ids[self._num_followed :]:
            if matcher.try_consume_tokens([token_id]) != 1:
                self._fail(matcher)
                return False
            self._num_followed += 1
            if time.thread_time() - began > MAX_CPU_S:
                break
        return self._num_followed == len(output_ids)

    def _masks(self, matcher: LLMatcher, draft_ids: Sequence[int], end_ids: Sequence[int], began: float) -> list[Mask]:
        masks: list[Mask] = []
        num_consumed = 0
        for draft_id in draft_ids:
            if matcher.try_consume_tokens([draft_id]) != 1:
                break
            num_consumed += 1
            mask = np.zeros(self._num_words, np.int32)
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            bits = mask.view(np.uint8)
            for token_id in self._eos_ids:
                bits[token_id // 8] &= np.uint8(~(1 << token_id % 8) & 0xFF)
            if matcher.is_accepting():
                for token_id in end_ids:
                    bits[token_id // 8] |= np.uint8(1 << token_id % 8)
            if matcher.is_error() or not mask.any():
                break
            masks.append(mask)
            if time.thread_time() - began > MAX_CPU_S:
                break
        if not matcher.is_error():
            matcher.rollback(num_consumed)
        return masks
