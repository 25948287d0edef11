from typing import Any

from hypothesis import strategies as st

from tandem.sampling_params import ALL_LOGPROBS, MAX_LOGPROBS, SamplingParams


def any_sampling_params(vocab_size: int = 1000) -> st.SearchStrategy[SamplingParams]:
    """Draw parameters; extreme and neutral values are frequent."""
    token_ids = st.integers(0, vocab_size - 1)
    bias = st.dictionaries(token_ids, st.floats(-100, 100), max_size=4)
    return st.builds(
        _params,
        max_tokens=st.integers(1, 2**31),
        temperature=st.sampled_from([0.0, 1e-6, 1.0]) | st.floats(0.05, 5),
        top_k=st.sampled_from([-1, 0, 1]) | st.integers(1, vocab_size + 5),
        top_p=st.sampled_from([0.0, 1.0]) | st.floats(0, 1),
        min_p=st.sampled_from([0.0, 1.0]) | st.floats(0, 1),
        repetition_penalty=st.just(1.0) | st.floats(0.01, 100),
        presence_penalty=st.just(0.0) | st.floats(-2, 2),
        frequency_penalty=st.just(0.0) | st.floats(-2, 2),
        logit_bias=st.just(()) | bias.map(lambda pairs: tuple(sorted(pairs.items()))),
        seed=st.integers(0, 2**64 - 1),
        stop_token_ids=st.lists(token_ids, max_size=3).map(tuple),
        reported=st.tuples(st.none() | st.integers(0, MAX_LOGPROBS), st.lists(token_ids, max_size=3).map(tuple)),
        min_tokens=st.integers(0, 1),
        num_prompt_logprobs=st.none() | st.integers(ALL_LOGPROBS, MAX_LOGPROBS),
        allowed_token_ids=st.just(()) | st.lists(token_ids, max_size=6).map(tuple),
    )


def _params(reported: tuple[int | None, tuple[int, ...]], **fields: Any) -> SamplingParams:
    num_logprobs, logprob_token_ids = reported
    # Without log probabilities no token of them may be named.
    named = () if num_logprobs is None else logprob_token_ids
    return SamplingParams(num_logprobs=num_logprobs, logprob_token_ids=named, **fields)
