"""Grammars of outputs: masks of the tokens that may come next.

A grammar is a text in llguidance's format (https://github.com/guidance-ai/llguidance). Masks depend only on the grammar
and the output so far, so they agree on all workers and in all attempts.
"""

import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from tandem.grammar_limits import LIMITS, one_line

logger = logging.getLogger(__name__)

# The router refuses grammars that need more than 128 MiB or a second to compile.
MAX_NUM_KEPT = 64
MAX_BYTES_KEPT = 2**21
NUM_COMPILERS = 2
NUM_MASK_THREADS = 4
WORD_BITS = 32


@dataclass(eq=False, slots=True)
class CompiledGrammar:
    text: str
    matcher: "Future[LLMatcher]"
    num_users: int = 0


class Constraint:
    def __init__(self, compiled: CompiledGrammar) -> None:
        self.compiled = compiled
        self._own: LLMatcher | None = None
        self._num_followed = 0
        self._error = ""

    @property
    def is_ready(self) -> bool:
        """True if the compilation has ended or failed."""
        return self.compiled.matcher.done()

    @property
    def error(self) -> str:
        """Reason why the next tokens are unknown, or ""."""
        if not self._error and self.is_ready and (error := self.compiled.matcher.exception()) is not None:
            self._error = str(error)
        return self._error

    @property
    def may_do_better(self) -> bool:
        """True if another attempt may succeed: outputs of one compiled grammar share llguidance's limits."""
        return self.compiled.num_users > 1

    def follow(self, token_ids: Sequence[int], prompt_len: int) -> None:
        new = token_ids[prompt_len + self._num_followed :]
        self._num_followed += len(new)
        if new and not self.error and not self.matcher.consume_tokens(list(new)):
            self._error = one_line(self.matcher.get_error()) or "the output has left the grammar"

    def fail(self, why: str) -> None:
        self._error = self._error or why

    @property
    def matcher(self) -> LLMatcher:
        if self._own is None:
            self._own = self.compiled.matcher.result().deep_copy()
            self.compiled.num_users += 1
        return self._own


class Grammars:
    """Grammars of one engine, compiled on threads without the GIL."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._executor = LLExecutor(NUM_MASK_THREADS)
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, "grammars")
        self._kept: OrderedDict[str, CompiledGrammar] = OrderedDict()

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

    def constraint(self, grammar: str) -> Constraint:
        compiled = self._kept.get(grammar)
        if compiled is None:
            compiled = CompiledGrammar(grammar, self._compilers.submit(self._compile, grammar))
            self._kept[grammar] = compiled
            while len(self._kept) > 1 and (
                len(self._kept) > MAX_NUM_KEPT or sum(map(len, self._kept)) > MAX_BYTES_KEPT
            ):
                self._kept.popitem(last=False)
        self._kept.move_to_end(grammar)
        return Constraint(compiled)

    def masks(self, constraints: Sequence[tuple[Constraint, Sequence[int]]]) -> "np.ndarray[Any, np.dtype[np.int32]]":
        """Returns the tokens that may come next, as bits, lowest first: (len(constraints), words) int32.

        Args:
            constraints: ready constraints, each with the token ids that may end its output. If a mask cannot be made,
                the constraint's `error` says why and the row allows all tokens.
        """
        num_words = -(-self._vocab_size // WORD_BITS)
        masks = np.zeros((len(constraints), num_words), dtype=np.int32)
        alive = [(row, *pair) for row, pair in enumerate(constraints) if not pair[0].error]
        if alive:
            matchers = [(constraint.matcher, row) for row, constraint, _ in alive]
            self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, 4 * num_words, len(masks))
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
                if self._kept.get(constraint.compiled.text) is constraint.compiled:
                    del self._kept[constraint.compiled.text]
        return masks

    def close(self) -> None:
        self._compilers.shutdown(wait=False, cancel_futures=True)

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
