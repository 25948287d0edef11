"""Sampling parameters of a request, and the log probabilities reported for its tokens."""

from collections.abc import Collection
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
# OpenAI's limit for logit_bias. Both lists travel with every attempt and are read in every step.
MAX_NUM_BIASED = 300
MAX_NUM_STOP_TOKENS = 300
# Travels with every attempt; a step reads a bit per token of the vocabulary, whatever the number.
MAX_NUM_ALLOWED = 2**14
# Reported with every output token.
MAX_NUM_LOGPROB_IDS = 128
# As num_prompt_logprobs: the whole vocabulary.
ALL_LOGPROBS = -1
# In UTF-8; travels with every attempt too.
MAX_GRAMMAR_BYTES = 2**17
# Limits of the protobuf fields.
MAX_TEMPERATURE = 3.4e38
MAX_TOP_K = 2**31 - 1
MAX_UINT32 = 2**32 - 1
MAX_SEED = 2**64 - 1
# Dividing logits by less than this only loses precision.
GREEDY_BELOW_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters, sent to every worker that may continue the request. tandem.engine.sampler has the formulas.

    The ranges are those of OpenAI's API and vLLM.

    Attributes:
        max_tokens: maximum output tokens over all attempts, at least 1.
        min_tokens: output tokens before a stop token may be chosen, unless a grammar allows nothing else; at most
            max_tokens.
        temperature: 0 to MAX_TEMPERATURE; greedy below GREEDY_BELOW_TEMPERATURE.
        top_k: keep only the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the most likely tokens up to this total probability, 0 to 1; at least one token stays.
        min_p: keep tokens with at least this fraction of the most likely token's probability, 0 to 1.
        repetition_penalty: for tokens of prompt and output, 0.01 to 100; 1 disables it.
        presence_penalty: for tokens in the output, -2 to 2.
        frequency_penalty: per occurrence in the output, -2 to 2.
        logit_bias: (token id, bias of -100 to 100) pairs, ascending by token id, without duplicates.
        seed: 64 bits; with the position in the sequence, the only source of randomness.
        stop_token_ids: tokens that end the output, including end-of-sequence ids unless the client ignores them.
        num_logprobs, num_prompt_logprobs: alternatives to report per output or prompt token, 0 to MAX_LOGPROBS, or
            None. ALL_LOGPROBS reports the whole vocabulary per prompt token.
        grammar: in llguidance's format; "" for none. A complete output may end with a stop token; a stop token that is
            text may end it earlier.
        allowed_token_ids: the only tokens that may be chosen, stop tokens included; () for all. Excludes a grammar.
        logprob_token_ids: tokens to report per output token instead of the most likely; needs num_logprobs.

    Raises:
        ValueError: a value is out of range, not a number, or infinite; the message names the field.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None
    grammar: str = ""
    min_tokens: int = 0
    num_prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    logprob_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, 1, MAX_UINT32)
        if self.min_tokens:
            _check("min_tokens", self.min_tokens, 0, self.max_tokens)
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(f"temperature must be a number of at least 0, not {self.temperature:g}")
        _check("top_k", self.top_k, -1, MAX_TOP_K)
        _check("top_p", self.top_p, 0, 1)
        _check("min_p", self.min_p, 0, 1)
        _check("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check("presence_penalty", self.presence_penalty, -2, 2)
        _check("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.logit_bias:
            self._check_bias()
        _check("seed", self.seed, 0, MAX_SEED)
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            if token_ids := getattr(self, name):
                # Checking the extremes checks all.
                _check(name, min(token_ids), 0, MAX_UINT32)
                _check(name, max(token_ids), 0, MAX_UINT32)
        if self.logprob_token_ids and self.num_logprobs is None:
            raise ValueError("logprob_token_ids needs logprobs")
        if self.num_logprobs is not None:
            _check("num_logprobs", self.num_logprobs, 0, MAX_LOGPROBS)
        if self.num_prompt_logprobs is not None:
            _check("prompt_logprobs", self.num_prompt_logprobs, ALL_LOGPROBS, MAX_LOGPROBS)
        if self.grammar and len(self.grammar.encode()) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"the grammar exceeds {MAX_GRAMMAR_BYTES} bytes in its internal format: simplify it")
        if self.grammar and not self.stop_token_ids:
            raise ValueError("a grammar needs at least one stop token")
        if self.grammar and self.allowed_token_ids:
            # Together they might leave no token.
            raise ValueError("allowed_token_ids cannot be had with structured output")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW_TEMPERATURE

    @property
    def has_filters(self) -> bool:
        """Whether top_k or top_p may drop tokens."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def needs_argmax_only(self) -> bool:
        return (
            self.is_greedy
            and not self.logit_bias
            and not self.has_penalties
            and self.num_logprobs is None
            and not self.grammar
            and not self.allowed_token_ids
        )

    def with_seed(self, seed: int) -> "SamplingParams":
        """Copy without validation: a request may have a hundred outputs that differ only in their seed."""
        assert 0 <= seed <= MAX_SEED
        copied: Any = copy(self)
        object.__setattr__(copied, "seed", seed)
        return copied

    def without_prompt_logprobs(self) -> "SamplingParams":
        if self.num_prompt_logprobs is None:
            return self
        copied: Any = copy(self)
        object.__setattr__(copied, "num_prompt_logprobs", None)
        return copied

    def finish_reason(
        self, token_id: int, num_output_tokens: int, stop_token_ids: Collection[int] | None = None
    ) -> str:
        """Return "stop", "length" or "" for an output that ends with `token_id`."""
        if token_id in (self.stop_token_ids if stop_token_ids is None else stop_token_ids):
            return "stop"
        if num_output_tokens >= self.max_tokens:
            return "length"
        return ""

    def _check_bias(self) -> None:
        token_ids, _ = zip(*self.logit_bias, strict=True)
        _check("logit_bias's token ids", min(token_ids), 0, MAX_UINT32)
        _check("logit_bias's token ids", max(token_ids), 0, MAX_UINT32)
        if any(low >= high for low, high in pairwise(token_ids)):
            raise ValueError("logit_bias must be in order of token ids, each once")
        # Build messages only for suspects, including NaN.
        for token_id, bias in self.logit_bias:
            if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                _check(f"logit_bias of token {token_id}", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities of one token, before bias, penalties, temperature and filters.

    Attributes:
        top: the most likely tokens, descending; or logprob_token_ids, in their order.
    """

    logprob: float
    top: tuple[TopLogprob, ...] = ()


def _check(name: str, value: float, low: float, high: float) -> None:
    # A limit that travelled as float32 may exceed itself slightly.
    slack = 1e-6 if isinstance(value, float) else 0
    # NaN fails this comparison.
    if not low - abs(low) * slack <= value <= high * (1 + slack):
        raise ValueError(f"{name} must be between {low:g} and {high:g}, not {value:g}")
