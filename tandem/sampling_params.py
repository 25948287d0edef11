"""How the tokens of one request are chosen and when they end, and what is reported of each choice."""

from collections.abc import Collection
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
# A client may name so many tokens in each of these; the first is OpenAI's own limit. Both travel with every attempt,
# and every step looks at them.
MAX_NUM_BIASED = 300
MAX_NUM_STOP_TOKENS = 300
# Of a grammar's text, in UTF-8. It too travels with every attempt.
MAX_GRAMMAR_BYTES = 2**16
# A message between processes can carry no larger values.
MAX_TEMPERATURE = 3.4e38
MAX_TOP_K = 2**31 - 1
MAX_UINT32 = 2**32 - 1
MAX_SEED = 2**64 - 1
# Dividing logits by less than this only loses precision.
GREEDY_BELOW_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What travels with a request to every worker that may continue it. tandem.engine.sampler has the formulas.

    The ranges admit what OpenAI's API and vLLM admit.

    Attributes:
        max_tokens: output tokens at most, at least 1; counted over all attempts.
        min_tokens: output tokens before which none of the stop_token_ids is chosen, unless a grammar lets nothing else
            follow; at most max_tokens, and counted alike.
        temperature: 0 to MAX_TEMPERATURE; 0 (below GREEDY_BELOW_TEMPERATURE) is greedy: the most likely token.
        top_k: only the k most likely tokens; 0 or -1: all.
        top_p: only the most likely tokens that together have this probability, 0 to 1; always at least one.
        min_p: only tokens at least this times as likely as the most likely one, 0 to 1.
        repetition_penalty: for tokens of prompt and output, 0.01 to 100; 1 is none.
        presence_penalty: for tokens that are in the output, -2 to 2.
        frequency_penalty: for each time that a token is in the output, -2 to 2.
        logit_bias: (token id, -100 to 100) pairs added to the logits, in order of token ids, each id once.
        seed: 64 bits; with the position in the whole sequence, the only source of randomness. Greedy decoding
            ignores it.
        stop_token_ids: tokens that end the output, the model's end-of-sequence ids among them unless the client
            asked to ignore those.
        num_logprobs: None, or how many of the most likely tokens to report with each token, 0 to MAX_LOGPROBS.
        num_prompt_logprobs: None, or how many of the most likely tokens to report with each token of the prompt, 0 to
            MAX_LOGPROBS.
        grammar: what the output keeps to, in llguidance's form; "": to nothing. Where it is whole it may end in one of
            the stop_token_ids; one of these that is text may end it before.

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
        if self.stop_token_ids:
            # What is right of the smallest and the largest is right of all.
            _check("stop_token_ids", min(self.stop_token_ids), 0, MAX_UINT32)
            _check("stop_token_ids", max(self.stop_token_ids), 0, MAX_UINT32)
        if self.num_logprobs is not None:
            _check("num_logprobs", self.num_logprobs, 0, MAX_LOGPROBS)
        if self.num_prompt_logprobs is not None:
            _check("prompt_logprobs", self.num_prompt_logprobs, 0, MAX_LOGPROBS)
        if self.grammar and len(self.grammar.encode()) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"a grammar may have {MAX_GRAMMAR_BYTES} bytes, its own form included")
        if self.grammar and not self.stop_token_ids:
            raise ValueError("an output that keeps to a grammar needs a token to end with")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW_TEMPERATURE

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
        )

    def with_seed(self, seed: int) -> "SamplingParams":
        """The same with another seed, of 64 bits. What has been checked is not checked again: a request may have a
        hundred outputs that differ in nothing else."""
        assert 0 <= seed <= MAX_SEED
        copied: Any = copy(self)
        object.__setattr__(copied, "seed", seed)
        return copied

    def without_prompt_logprobs(self) -> "SamplingParams":
        """The same for who has those of the prompt already."""
        if self.num_prompt_logprobs is None:
            return self
        copied: Any = copy(self)
        object.__setattr__(copied, "num_prompt_logprobs", None)
        return copied

    def finish_reason(
        self, token_id: int, num_output_tokens: int, stop_token_ids: Collection[int] | None = None
    ) -> str:
        """Returns "stop", "length" or "" for an output whose last token is `token_id`.

        Args:
            stop_token_ids: the same as a set, from who asks at every step.
        """
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
        # Only what seems to be out of range has its own name made; the comparison is written so that NaN does.
        for token_id, bias in self.logit_bias:
            if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                _check(f"logit_bias of token {token_id}", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the most likely tokens of a position."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model thought of a token, and of the most likely ones, before sampling changed anything.

    Attributes:
        logprob: natural logarithm of the token's probability.
        top: the most likely tokens, the most likely first; the token itself may be among them.
    """

    logprob: float
    top: tuple[TopLogprob, ...] = ()


def _check(name: str, value: float, low: float, high: float) -> None:
    # A limit that travelled as float32 may have come out a little beyond itself.
    slack = 1e-6 if isinstance(value, float) else 0
    # The comparison is written so that NaN fails.
    if not low - abs(low) * slack <= value <= high * (1 + slack):
        raise ValueError(f"{name} must be between {low:g} and {high:g}, not {value:g}")
