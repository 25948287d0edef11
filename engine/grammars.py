"""Grammars of outputs: masks of the tokens that may come next.

A grammar is a text in llguidance's format (https://github.com/guidance-ai/llguidance). Masks depend only on the grammar
and the output so far, so they agree on all workers and in all attempts.
"""

import json
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from tandem.engine.grammar_compilers import CompiledGrammar, GrammarCompilers, KeptGrammars
from tandem.engine.grammar_drafts import DraftMatcher
from tandem.engine.grammar_follower import LEFT, GrammarFollower, ParallelMatchers
from tandem.grammar_limits import (
    LIMITS,
    MAX_MASK_CPU_S,
    MAX_STEP_CPU_S,
    TOO_COSTLY,
    TOO_COSTLY_TOGETHER,
    one_line,
)

logger = logging.getLogger(__name__)

NUM_MASK_THREADS = 4
WORD_BITS = 32
# If a step's masks take longer, its tokens are consumed in parallel and without the GIL, which takes 40 us.
COSTLY_MASKS_S = 0.001


class Constraint:
    def __init__(self, compiled: CompiledGrammar) -> None:
        self.compiled = compiled
        self._own: LLMatcher | None = None
        self._is_behind = False
        self._num_followed = 0
        self._error = ""
        self._may_do_better = True

    @property
    def compiled_matcher(self) -> "Future[LLMatcher]":
        return self.compiled.matcher

    @property
    def is_ready(self) -> bool:
        """True if the grammar is compiled and the output of earlier attempts followed, or if either has failed."""
        return self.compiled.matcher.done() and not self._is_behind

    @property
    def error(self) -> str:
        """Reason why the next tokens are unknown, or ""."""
        if not self._error and self.is_ready and (error := self.compiled.matcher.exception()) is not None:
            self._error = str(error)
        return self._error

    @property
    def may_do_better(self) -> bool:
        """True if another attempt may succeed: outputs of one compiled grammar share llguidance's limits."""
        return self._may_do_better and self.compiled.num_users > 1

    def follow(self, token_ids: Sequence[int], prompt_len: int) -> None:
        """Consumes the tokens behind those followed before. Each must be allowed by the last mask."""
        for token_id in self.take_new(token_ids, prompt_len):
            if not self.error and not self.matcher.consume_token(token_id):
                self.fail_to_consume()

    def take_new(self, token_ids: Sequence[int], prompt_len: int) -> Sequence[int]:
        """Returns the tokens to consume, and counts them as followed."""
        new = token_ids[prompt_len + self._num_followed :]
        self._num_followed += len(new)
        return new

    def fall_behind(self) -> None:
        self._is_behind = True

    def caught_up(self, num_tokens: int, error: str, *, may_do_better: bool = True) -> None:
        """Called by the follower's thread. Args: num_tokens: length of the followed output."""
        self._num_followed, self._error, self._may_do_better = num_tokens, error, may_do_better
        self._is_behind = False

    def fail(self, why: str, *, may_do_better: bool = True) -> None:
        if not self._error:
            self._error, self._may_do_better = why, may_do_better

    def fail_to_consume(self) -> None:
        self.fail(one_line(self.matcher.get_error()) or LEFT)

    @property
    def matcher(self) -> LLMatcher:
        if self._own is None:
            self._own = self.compiled.new_user()
        return self._own


class Grammars:
    """Grammars of one engine, compiled on threads without the GIL."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._num_words = -(-vocab_size // WORD_BITS)
        self._executor = LLExecutor(NUM_MASK_THREADS)
        self._parallel = ParallelMatchers(NUM_MASK_THREADS, self._failed_matcher())
        self._last_masks_s = 0.0
        self._follower = GrammarFollower(self._failed_matcher, self._num_words)
        self._compilers = GrammarCompilers(self._compile)
        self._kept = KeptGrammars(self._compilers)
        self._kept_for_drafts = KeptGrammars(self._compilers)

    @classmethod
    def of_model(cls, model_dir: Path, vocab_size: int) -> "Grammars | None":
        """Returns None if the model has no tokenizer whose tokens are bytes of text."""
        try:
            # Holds the GIL while it sorts the tokens, half a second for 50,000.
            tokenizer = LLTokenizer(
                (model_dir / "tokenizer.json").read_text(), n_vocab=vocab_size, eos_token=_eos_token_ids(model_dir)
            )
        except (OSError, ValueError, RecursionError) as error:
            logger.info("no grammars can be followed: %s", error)
            return None
        return cls(tokenizer, vocab_size)

    def constraint(self, grammar: str, output_ids: Sequence[int] = (), client: str = "") -> Constraint:
        """
        Args:
            output_ids: output of earlier attempts; it is followed on other threads.
            client: takes turns with other clients at the compilers.
        """
        constraint = Constraint(self._kept.get(grammar, client))
        if output_ids:
            constraint.fall_behind()
            self._follower.begin(constraint, output_ids)
        return constraint

    def draft_matcher(self, grammar: str, client: str = "") -> DraftMatcher:
        """Args: client: as for `constraint`."""
        kept = self._kept_for_drafts
        return DraftMatcher(kept.get(grammar, client), self._tokenizer.eos_tokens, self._num_words, kept.drop)

    def follow(self, outputs: Sequence[tuple[Constraint, Sequence[int], int]]) -> None:
        """Consumes the tokens that are new since the last masks.

        Args:
            outputs: ready constraints, each with the tokens of its sequence and the length of the prompt.
        """
        if self._last_masks_s < COSTLY_MASKS_S:
            for constraint, token_ids, prompt_len in outputs:
                constraint.follow(token_ids, prompt_len)
            return
        left = [(constraint, list(constraint.take_new(ids, prompt_len))) for constraint, ids, prompt_len in outputs]
        while left := [(constraint, new) for constraint, new in left if new and not constraint.error]:
            consumed = self._parallel.consume([(constraint.matcher, new.pop(0)) for constraint, new in left])
            for (constraint, _), is_consumed in zip(left, consumed, strict=True):
                if not is_consumed:
                    constraint.fail_to_consume()

    def masks(self, constraints: Sequence[tuple[Constraint, Sequence[int]]]) -> "np.ndarray[Any, np.dtype[np.int32]]":
        """Returns the tokens that may come next, as bits, lowest first: (len(constraints), words) int32.

        Args:
            constraints: ready constraints, each with the token ids that may end its output. If a mask cannot be made,
                the constraint's `error` says why and the row allows all tokens.
        """
        masks = np.zeros((len(constraints), self._num_words), dtype=np.int32)
        alive = [(row, *pair) for row, pair in enumerate(constraints) if not pair[0].error]
        if alive:
            matchers = [(constraint.matcher, row) for row, constraint, _ in alive]
            began = time.perf_counter()
            if self._last_masks_s > MAX_MASK_CPU_S:
                self._make_one_by_one(alive, masks)
            else:
                self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, 4 * self._num_words, len(masks))
            self._last_masks_s = time.perf_counter() - began
        # End tokens are allowed only as the request states.
        bits = masks.view(np.uint8)
        for token_id in self._tokenizer.eos_tokens:
            bits[:, token_id // 8] &= np.uint8(~(1 << token_id % 8) & 0xFF)
        for row, constraint, end_ids in alive:
            if constraint.matcher.is_error():
                constraint.fail(one_line(constraint.matcher.get_error()))
            elif constraint.matcher.is_accepting():
                for token_id in end_ids:
                    bits[row, token_id // 8] |= np.uint8(1 << token_id % 8)
        num_allowed = np.count_nonzero(masks, axis=1)
        for row, (constraint, _) in enumerate(constraints):
            if not num_allowed[row]:
                constraint.fail("nothing may follow")
            if constraint.error:
                masks[row] = -1
                self._kept.drop(constraint.compiled)
        return masks

    def _make_one_by_one(
        self, alive: Sequence[tuple[int, Constraint, Sequence[int]]], masks: "np.ndarray[Any, np.dtype[np.int32]]"
    ) -> None:
        """Ends the outputs whose masks cost too much, alone or together, so that they hold up their batch twice at
        most."""
        costs: list[tuple[float, Constraint]] = []
        for row, constraint, _ in alive:
            began = time.thread_time()
            constraint.matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks[row].nbytes)
            cost = time.thread_time() - began
            if constraint.matcher.is_error():
                continue
            if cost > MAX_MASK_CPU_S:
                constraint.fail(TOO_COSTLY, may_do_better=False)
            else:
                costs.append((cost, constraint))
        costs.sort(key=lambda pair: pair[0])
        total = sum(cost for cost, _ in costs)
        while total > MAX_STEP_CPU_S:
            cost, costliest = costs.pop()
            total -= cost
            costliest.fail(TOO_COSTLY_TOGETHER, may_do_better=False)

    def close(self) -> None:
        self._follower.close()
        self._compilers.close()

    def _failed_matcher(self) -> LLMatcher:
        return LLMatcher(self._tokenizer, "", log_level=0)

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise ValueError(one_line(matcher.get_error()))
        return matcher


def no_constraint(reason: str) -> Constraint:
    failed: Future[LLMatcher] = Future()
    failed.set_exception(ValueError(reason))
    return Constraint(CompiledGrammar("", failed))


def _eos_token_ids(model_dir: Path) -> list[int] | None:
    """End tokens, which are no text in any grammar; None lets llguidance find them."""
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        content = json.loads(path.read_text()) if path.exists() else {}
        ids = content.get("eos_token_id") if isinstance(content, dict) else None
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(type(token_id) is int for token_id in ids):
                raise ValueError(f"{path}: eos_token_id must be a number or a list of numbers")
            return ids
    return None
