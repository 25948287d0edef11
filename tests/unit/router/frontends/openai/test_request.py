"""Common parts of completions and chat completions."""

from typing import Any

import pytest

from tandem.lifecycle import RECEIVED
from tandem.router.config import RouterConfig
from tandem.router.errors import InvalidRequestError
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.openai.request import (
    MAX_PROMPT_TOKENS,
    cache_namespace,
    check_num_choices,
    check_num_prompt_tokens,
)
from tandem.router.frontends.openai.sampling import sampling_options
from tandem.router.frontends.openai.schema import CompletionRequest
from tandem.router.policies.least_loaded import LeastLoaded
from tandem.router.requests.request_spec import TokenizedPrompt
from tandem.router.router import Router
from tandem.router.text.generation_config import SamplingDefaults
from tests.fakes.tokenizer import ByteTokenizer


def body(**fields: Any) -> CompletionRequest:
    return CompletionRequest(prompt="hi", **fields)


def new_frontend(defaults: SamplingDefaults | None = None) -> Frontend:
    config = RouterConfig("nowhere", "fake", 400)
    return Frontend(Router(config, LeastLoaded()), ByteTokenizer(), config, defaults)  # type: ignore[arg-type]


def test_outputs_are_counted_over_all_prompts() -> None:
    check_num_choices(2, 64)
    check_num_choices(128, None)
    with pytest.raises(InvalidRequestError, match="at most 128 outputs for one request, not 129"):
        check_num_choices(43, 3)


def test_options_are_openai_s() -> None:
    frontend = new_frontend()
    options = sampling_options(frontend, body(seed=-1, stop="x", logit_bias={"7": 2}), 5, None)
    assert (options.seed, options.stop, options.logit_bias) == (2**64 - 1, ["x"], {7: 2.0})
    assert options.plain == {"temperature": 1.0}
    assert sampling_options(frontend, body(temperature=0, top_k=3), 5, None).plain == {"temperature": 0, "top_k": 3}
    # Every unstreamed answer has the usage.
    sampling_options(frontend, body(stream_options={"include_usage": True}), 5, None)


def test_what_a_request_leaves_out_is_the_model_s() -> None:
    frontend = new_frontend(SamplingDefaults({"temperature": 0.6, "top_k": 20}))
    assert sampling_options(frontend, body(), 5, None).plain == {"temperature": 0.6, "top_k": 20}
    said = sampling_options(frontend, body(temperature=1, top_k=0, top_p=None), 5, None)
    assert said.plain == {"temperature": 1, "top_k": 0}


def test_vllm_s_name_of_a_namespace_is_taken() -> None:
    names = [cache_namespace(fields) for fields in (body(cache_salt="x"), body(cache_namespace="x"), body())]
    assert names == ["x", "x", ""]


def test_the_prompts_of_all_outputs_together_are_limited() -> None:
    prompts = [TokenizedPrompt((1,) * (MAX_PROMPT_TOKENS // 128 + 1), {RECEIVED: 1})]
    check_num_prompt_tokens(new_frontend(), prompts, 1)
    with pytest.raises(InvalidRequestError, match=f"one request may have {MAX_PROMPT_TOKENS}"):
        check_num_prompt_tokens(new_frontend(), prompts, 128)
