"""Requests before they are served, in every frontend."""

import asyncio
from typing import Any

import pytest

from tandem.adapters import AdapterEntry
from tandem.lifecycle import RECEIVED, TOKENIZED
from tandem.messages import NamespaceOwners
from tandem.prefix import owner_of, prefix_identities
from tandem.router.adapters.names import BASE_MODEL as BASE
from tandem.router.adapters.names import ServedModel
from tandem.router.config import RouterConfig
from tandem.router.errors import InvalidRequestError, OverloadedError, UnavailableError, UnknownModelError
from tandem.router.frontends.base import Frontend, PromptInput
from tandem.router.policies.cache_aware import CacheAware
from tandem.router.policies.least_loaded import LeastLoaded
from tandem.router.requests.request_spec import TokenizedPrompt
from tandem.router.router import Router
from tandem.router.text.prompt_encoder import MAX_INLINE_CHARACTERS
from tandem.sampling_params import SamplingParams
from tests.fakes.request_spec import request_spec
from tests.fakes.scripted_adapters import make_ref
from tests.fakes.scripted_worker import ScriptedWorker, hello
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
        assert tokenized.token_ids == (104, 105)
        assert tokenized.moments[RECEIVED] <= tokenized.moments[TOKENIZED]


def test_a_long_prompt_is_tokenized_beside_the_loop_with_the_same_result() -> None:
    text = "x" * (MAX_INLINE_CHARACTERS + 1)
    assert tokenize(text, max_model_len=len(text) + 1).token_ids == (ord("x"),) * len(text)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ("x" * MAX_MODEL_LEN, "400 tokens > 399 maximum; this model's maximum context length is 400 tokens"),
        ([1, 256], "token id 256 is outside the vocabulary of 256"),
        ([1, -1], "token id -1 is outside the vocabulary of 256"),
        ("x" * 1601, "1601 characters cannot fit; this model's maximum context length is 400 tokens"),
    ],
)
def test_what_cannot_be_served_is_refused(prompt: PromptInput, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        tokenize(prompt)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(("num_messages", "message"), [(0, "no messages"), (MAX_MODEL_LEN, "400 messages cannot fit")])
def test_a_chat_has_messages_that_can_fit(num_messages: int, message: str) -> None:
    new_frontend().check_num_messages(MAX_MODEL_LEN - 1)
    with pytest.raises(InvalidRequestError, match=message):
        new_frontend().check_num_messages(num_messages)


def test_another_model_is_named_with_the_one_that_is_served() -> None:
    new_frontend().served_model("")
    new_frontend().served_model("fake")
    with pytest.raises(UnknownModelError, match="model 'gpt' is not served here; 'fake' is"):
        new_frontend().served_model("gpt")


def test_a_priority_is_checked_with_the_rest_of_a_request() -> None:
    frontend = new_frontend(api_keys=("urgent 3", "plain"), max_priority=0)
    assert [g.tracker.spec.priority for g in frontend.begin(request_spec(key="urgent", priority=3))] == [3]
    with pytest.raises(InvalidRequestError, match="priority must be at most 0 for this client, not 1"):
        frontend.begin(request_spec(key="plain", priority=1))


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
    names = [frontend.cache_namespace(key, asked_for, BASE) for key in ("one", "two") for asked_for in ("", "tenant")]
    assert len(set(names)) == (2 if is_shared else 4)


@pytest.mark.parametrize("field", ["session_id", "client_request_id"])
@pytest.mark.parametrize(("name", "message"), [("x" * 257, "at most 256 characters"), ("\ud800", "half a character")])
def test_a_name_can_be_passed_on_and_told_back(field: str, name: str, message: str) -> None:
    frontend = new_frontend()
    fits: dict[str, Any] = {field: "x" * 256}
    frontend.begin(request_spec(**fits))
    with pytest.raises(InvalidRequestError, match=f"{field.removeprefix('client_')} .*{message}"):
        frontend.begin(request_spec(**{**fits, field: name}))


def test_each_output_is_a_request_of_its_own_in_the_same_session() -> None:
    spec = request_spec(sampling=SamplingParams(5, seed=7, num_prompt_logprobs=0), session_id="talk", priority=4)
    trackers = [generation.tracker for generation in new_frontend().begin(spec, 2)]
    assert [tracker.spec.sampling.seed for tracker in trackers] == [7, 8]
    # The prompt is scored once.
    assert [tracker.sampling.num_prompt_logprobs for tracker in trackers] == [0, None]
    assert {(tracker.spec.priority, tracker.spec.session_id) for tracker in trackers} == {(4, "talk")}
    assert len({tracker.request_id for tracker in trackers}) == 2


def test_what_all_outputs_have_alike_is_made_once() -> None:
    sampling_params = SamplingParams(5, logit_bias=((7, 1.0),), stop_token_ids=(5,))
    generations = new_frontend().begin(request_spec(sampling=sampling_params), 128)
    sampling = [generation.tracker.sampling for generation in generations]
    assert len({s.seed for s in sampling}) == 128
    assert {id(s.logit_bias) for s in sampling} == {id(sampling[0].logit_bias)}
    assert {id(s.stop_token_ids) for s in sampling} == {id(sampling[0].stop_token_ids)}


def test_each_choice_draws_with_a_seed_of_its_own() -> None:
    frontend = new_frontend()

    def seeds(asked_for: int) -> list[int]:
        generations = frontend.begin(request_spec(sampling=SamplingParams(5, seed=asked_for)), 3)
        return [generation.tracker.sampling.seed for generation in generations]

    assert seeds(7) == [7, 8, 9]
    assert seeds(2**64 - 1) == [2**64 - 1, 0, 1]


def test_a_prompt_s_prefixes_are_named_once_where_workers_are_chosen_by_them() -> None:
    async def scenario() -> None:
        config = RouterConfig("nowhere", "fake", MAX_MODEL_LEN, api_keys=("a", "b"))
        router = Router(config, CacheAware())
        frontend = Frontend(router, ByteTokenizer(), config)  # type: ignore[arg-type]
        router.connect_worker(hello("p", "prefill"), lambda _: None, lambda _: None)
        namespace = frontend.cache_namespace("a", "tenant", BASE)
        prompt = await frontend.tokenize(list(range(20)), namespace)
        assert prompt.identities == {4: prefix_identities(range(20), 4, namespace)}
        with pytest.raises(InvalidRequestError, match="cache_namespace must have at most"):
            frontend.cache_namespace("a", "x" * 257, BASE)
        assert (await frontend.tokenize([1] * 20)).identities == {}
        assert (await new_frontend().tokenize([1] * 20, "tenant")).identities == {}

    asyncio.run(scenario())


def test_cache_namespaces_outlive_the_cluster_with_their_secret() -> None:
    one, restarted, other = (
        new_frontend(cluster_token=token, namespace_secret=secret, api_keys=("first", "second"))
        for token, secret in (("a" * 32, "s" * 64), ("b" * 32, "s" * 64), ("a" * 32, "t" * 64))
    )
    keys, names = ("first", "second"), ("", "tenant", "second")
    namespaces = [
        [life.cache_namespace(key, name, BASE) for key in keys for name in names] for life in (one, restarted, other)
    ]
    assert namespaces[0] == namespaces[1]
    assert len({*namespaces[0], *namespaces[2]}) == 2 * len(keys) * len(names)
    assert one.turn_of("first", "grammar") != restarted.turn_of("first", "grammar")


def test_without_a_secret_cache_namespaces_are_the_cluster_s() -> None:
    one, other, restarted = (
        new_frontend(cluster_token=token).cache_namespace("first", "", BASE) for token in ("a" * 32, "a" * 32, "b" * 32)
    )
    assert one == other != restarted


def test_a_model_may_be_an_adapter() -> None:
    frontend = new_frontend(takes_adapters=True)
    with pytest.raises(UnavailableError, match="this router has just started"):
        frontend.served_model("sql")
    frontend.router.adapters.merge([AdapterEntry("sql", 1, "r", make_ref("a"))])
    model = frontend.served_model("sql")
    assert model == ServedModel("sql", make_ref("a"))
    with pytest.raises(UnknownModelError, match="'fake' is, and an adapter"):
        frontend.served_model("gpt")
    namespaces = {frontend.cache_namespace("", "tenant", one) for one in (model, BASE)}
    assert len(namespaces) == 2
    with pytest.raises(InvalidRequestError, match="holds a null character"):
        frontend.cache_namespace("", "tenant\0a", BASE)


def test_workers_learn_whose_requests_may_draft_from_each_other() -> None:
    frontend = new_frontend(api_keys=("first", "second 5"), shares_drafts=True)
    worker = ScriptedWorker(frontend.router, "d0", "decode")

    def owners(*keys: str) -> NamespaceOwners:
        return NamespaceOwners(tuple(owner_of(frontend.cache_namespace(key, "own", BASE)) for key in keys))

    assert worker.of(NamespaceOwners) == [owners("first", "second")]
    frontend.set_keys(("second", "third"))
    assert worker.of(NamespaceOwners)[1:] == [owners("second", "third")]
    again = ScriptedWorker(frontend.router, "d1", "decode")
    assert again.of(NamespaceOwners) == [owners("second", "third")]
    alone = new_frontend(api_keys=("first",))
    alone.set_keys(("second",))
    assert not ScriptedWorker(alone.router, "d0", "decode").of(NamespaceOwners)
