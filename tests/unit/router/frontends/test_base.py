"""What every frontend does with a request before it is served."""

import asyncio
from functools import partial
from typing import Any

import pytest

from tandem.lifecycle import RECEIVED, TOKENIZED
from tandem.prefix import prefix_identities
from tandem.router.config import RouterConfig
from tandem.router.errors import InvalidRequestError, OverloadedError, UnavailableError, UnknownModelError
from tandem.router.frontends.base import Frontend, PromptInput, TokenizedPrompt
from tandem.router.frontends.sampling import SamplingOptions
from tandem.router.policies.cache_aware import CacheAware
from tandem.router.policies.least_loaded import LeastLoaded
from tandem.router.router import Router
from tandem.router.text.prompt_encoder import MAX_INLINE_CHARACTERS
from tests.fakes.scripted_worker import hello
from tests.fakes.tokenizer import ByteTokenizer

MAX_MODEL_LEN = 400


def new_frontend(**config: Any) -> Frontend:
    router_config = RouterConfig("nowhere", "fake", **{"max_model_len": MAX_MODEL_LEN, **config})
    return Frontend(Router(router_config, LeastLoaded()), ByteTokenizer(), router_config)  # type: ignore[arg-type]


def tokenize(prompt: PromptInput, **config: Any) -> TokenizedPrompt:
    return asyncio.run(new_frontend(**config).tokenize(prompt))


def test_a_prompt_is_a_text_or_token_ids() -> None:
    for prompt in ("hi", [104, 105]):
        tokenized = tokenize(prompt)
        assert tokenized.token_ids == [104, 105]
        assert tokenized.moments[RECEIVED] <= tokenized.moments[TOKENIZED]


def test_a_long_prompt_is_tokenized_beside_the_loop_with_the_same_result() -> None:
    text = "x" * (MAX_INLINE_CHARACTERS + 1)
    assert tokenize(text, max_model_len=len(text) + 1).token_ids == [ord("x")] * len(text)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ("x" * MAX_MODEL_LEN, "the prompt has 400 tokens; the model's length is 400"),
        ([1, 256], "token id 256 is outside the vocabulary of 256"),
        ([1, -1], "token id -1 is outside the vocabulary of 256"),
        ("x" * 1601, "the prompt has 1601 characters; no more than 1600 can fit"),
    ],
)
def test_what_cannot_be_served_is_refused(prompt: PromptInput, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        tokenize(prompt)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(("num_messages", "message"), [(0, "no messages"), (MAX_MODEL_LEN, "400 messages, more than")])
def test_a_chat_has_messages_that_can_fit(num_messages: int, message: str) -> None:
    new_frontend().check_num_messages(MAX_MODEL_LEN - 1)
    with pytest.raises(InvalidRequestError, match=message):
        new_frontend().check_num_messages(num_messages)


def test_another_model_is_named_with_the_one_that_is_served() -> None:
    new_frontend().check_model("")
    new_frontend().check_model("fake")
    with pytest.raises(UnknownModelError, match="model 'gpt' is not served here; 'fake' is"):
        new_frontend().check_model("gpt")


def test_a_priority_is_checked_with_the_rest_of_a_request() -> None:
    async def scenario() -> None:
        frontend = new_frontend(api_keys=("urgent 3", "plain"), max_priority=0)
        prompt = await frontend.tokenize([1, 2])
        begin = partial(frontend.begin, prompt, SamplingOptions(), default_max_tokens=4)
        assert [g.tracker.priority for g in begin(key="urgent", priority=3)] == [3]
        with pytest.raises(InvalidRequestError, match="priority must be at most 0 for this client, not 1"):
            begin(key="plain", priority=1)

    asyncio.run(scenario())


def test_admission_counts_what_is_not_served_yet() -> None:
    frontend = new_frontend(max_requests_per_key=2, max_queued_requests=3)
    with pytest.raises(InvalidRequestError, match="3 outputs are more than the 2"), frontend.admission("", 3):
        pass
    with frontend.admission("", 2), pytest.raises(OverloadedError), frontend.admission(""):
        pass
    with frontend.admission("", 2):
        pass
    frontend.router.drain()
    with pytest.raises(UnavailableError, match="shutting down"), frontend.admission(""):
        pass


@pytest.mark.parametrize("is_shared", [False, True])
def test_keys_have_namespaces_of_their_own_unless_they_share(is_shared: bool) -> None:
    frontend = new_frontend(api_keys=("one", "two"), share_cache_between_keys=is_shared)
    prompt = TokenizedPrompt([1, 2], {})

    def namespace(key: str, asked_for: str) -> str:
        options = SamplingOptions(max_tokens=1)
        (begun,) = frontend.begin(prompt, options, key=key, default_max_tokens=1, cache_namespace=asked_for)
        return begun.tracker.cache_namespace

    names = [namespace(key, asked_for) for key in ("one", "two") for asked_for in ("", "tenant")]
    assert len(set(names)) == (2 if is_shared else 4)


@pytest.mark.parametrize("field", ["cache_namespace", "session_id", "client_request_id"])
@pytest.mark.parametrize(("name", "message"), [("x" * 257, "at most 256 characters"), ("\ud800", "half a character")])
def test_a_name_can_be_passed_on_and_told_back(field: str, name: str, message: str) -> None:
    frontend, prompt = new_frontend(), TokenizedPrompt([1], {RECEIVED: 1})
    longest: dict[str, Any] = {field: "x" * 256}
    frontend.begin(prompt, SamplingOptions(), key="", default_max_tokens=5, **longest)
    with pytest.raises(InvalidRequestError, match=f"{field.removeprefix('client_')} .*{message}"):
        named: dict[str, Any] = {field: name}
        frontend.begin(prompt, SamplingOptions(), key="", default_max_tokens=5, **named)


def test_what_all_outputs_have_alike_is_made_once() -> None:
    frontend, prompt = new_frontend(), TokenizedPrompt([1], {RECEIVED: 1})
    options = SamplingOptions(logit_bias={7: 1.0}, stop_token_ids=[5])
    generations = frontend.begin(prompt, options, key="", default_max_tokens=5, num_choices=128)
    sampling = [generation.tracker.sampling for generation in generations]
    assert len({s.seed for s in sampling}) == 128
    assert {id(s.logit_bias) for s in sampling} == {id(sampling[0].logit_bias)}
    assert {id(s.stop_token_ids) for s in sampling} == {id(sampling[0].stop_token_ids)}


def test_each_choice_draws_with_a_seed_of_its_own() -> None:
    frontend, prompt = new_frontend(), TokenizedPrompt([1], {RECEIVED: 1})

    def seeds(asked_for: int) -> list[int]:
        options = SamplingOptions(seed=asked_for)
        generations = frontend.begin(prompt, options, key="", default_max_tokens=5, num_choices=3)
        return [generation.tracker.sampling.seed for generation in generations]

    assert seeds(7) == [7, 8, 9]
    assert seeds(2**64 - 1) == [2**64 - 1, 0, 1]


def test_a_prompt_s_prefixes_are_named_once_where_workers_are_chosen_by_them() -> None:
    async def scenario() -> None:
        config = RouterConfig("nowhere", "fake", MAX_MODEL_LEN, api_keys=("a", "b"))
        router = Router(config, CacheAware())
        frontend = Frontend(router, ByteTokenizer(), config)  # type: ignore[arg-type]
        router.connect_worker(hello("p", "prefill"), lambda _: None, lambda _: None)
        namespace = frontend.cache_namespace("a", "tenant")
        prompt = await frontend.tokenize(list(range(20)), namespace)
        assert prompt.identities == {4: prefix_identities(range(20), 4, namespace)}
        begin = partial(frontend.begin, prompt, SamplingOptions(), default_max_tokens=4)
        assert begin(key="a", cache_namespace="tenant")[0].tracker.prompt_identities == prompt.identities
        assert begin(key="b", cache_namespace="tenant")[0].tracker.prompt_identities == {}
        with pytest.raises(InvalidRequestError, match="cache_namespace must have at most"):
            frontend.cache_namespace("a", "x" * 257)
        assert (await frontend.tokenize([1] * 20)).identities == {}
        assert (await new_frontend().tokenize([1] * 20, "tenant")).identities == {}

    asyncio.run(scenario())
