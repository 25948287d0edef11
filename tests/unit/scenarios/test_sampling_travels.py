"""Every accepted request can be encoded for a worker: an encoding error would break the worker's stream."""

import asyncio
import contextlib
import math
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.messages import Admit, Prefill
from tandem.router.adapters.names import BASE_MODEL
from tandem.router.config import RouterConfig
from tandem.router.errors import InvalidRequestError
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.sampling import SamplingOptions
from tandem.router.policies.least_loaded import LeastLoaded
from tandem.router.requests.request_spec import RequestSpec
from tandem.router.router import Router
from tandem.rpc.codec import ROUTER_CODEC
from tandem.sampling_params import SamplingParams
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import worker_pb2
from tests.fakes.sampling_params import any_sampling_params
from tests.fakes.tokenizer import ByteTokenizer

FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTEGERS = ("max_tokens", "min_tokens", "top_k", "seed", "num_logprobs", "num_prompt_logprobs")
MAX_MODEL_LEN = 400
NUM_EXAMPLES = 500

wild_floats = st.floats() | st.sampled_from([-2.0, -1.0, 0.0, 1e-45, 0.01, 1.0, 2.0, 100.0, 3.4e38, 1e39, math.inf])
wild_integers = st.integers(-(2**70), 2**70) | st.sampled_from(
    [-1, 0, 1, 20, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1, 2**64]
)
wild_values: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(FLOATS, wild_floats),
    **dict.fromkeys(INTEGERS, wild_integers),
    "logit_bias": st.dictionaries(wild_integers, wild_floats | st.floats(-100, 100), min_size=1, max_size=3).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    "stop_token_ids": st.lists(wild_integers, min_size=1, max_size=3).map(tuple),
}
wild_fields = st.sampled_from(sorted(wild_values)).flatmap(lambda name: st.tuples(st.just(name), wild_values[name]))


def travelled(messages: list[object]) -> list[object]:
    wire = ROUTER_CODEC.encode(messages).SerializeToString()
    return ROUTER_CODEC.decode(worker_pb2.RouterBatch.FromString(wire))


@settings(max_examples=NUM_EXAMPLES)
@given(any_sampling_params(vocab_size=2**31 - 8), wild_fields)
def test_valid_sampling_params_reach_workers_unchanged(params: SamplingParams, field: tuple[str, Any]) -> None:
    name, value = field
    # Refused values are skipped, accepted ones must travel.
    with contextlib.suppress(ValueError):
        params = replace(params, **{name: value})
    admit = Admit("r", 0, (1, 2), (), params, 1.0)
    assert travelled([admit]) == [admit]


@given(any_sampling_params())
def test_single_precision_values_are_valid(params: SamplingParams) -> None:
    sent = pb.SamplingParams(
        **{name: getattr(params, name) for name in FLOATS},
        top_k=params.top_k,
        seed=params.seed,
        logit_bias=dict(params.logit_bias),
    )
    came = pb.SamplingParams.FromString(sent.SerializeToString())
    again = replace(
        params,
        **{name: getattr(came, name) for name in FLOATS},
        top_k=came.top_k,
        seed=came.seed,
        logit_bias=tuple(sorted(came.logit_bias.items())),
    )
    for name in FLOATS:
        assert math.isclose(getattr(again, name), getattr(params, name), rel_tol=1e-6, abs_tol=1e-44)
    assert [i for i, _ in again.logit_bias] == [i for i, _ in params.logit_bias]
    assert (again.top_k, again.seed) == (params.top_k, params.seed)


def rarely(wild: st.SearchStrategy[Any], tame: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw `wild` rarely, so that one wrong field does not hide the effect of the others."""
    return st.integers(0, 7).flatmap(lambda n: wild if n == 0 else tame)


ids = st.integers(0, ByteTokenizer.vocab_size - 1)
wild_text = st.text(st.characters(), max_size=300)
any_options = st.builds(
    SamplingOptions,
    max_tokens=rarely(wild_integers, st.none() | st.integers(1, 390)),
    seed=rarely(wild_integers, st.none() | st.integers(0, 2**64 - 1)),
    logit_bias=rarely(
        st.dictionaries(wild_integers, wild_floats, max_size=3), st.dictionaries(ids, st.floats(-100, 100), max_size=3)
    ),
    stop=rarely(st.lists(wild_text, max_size=20), st.lists(st.text(min_size=1, max_size=5), max_size=3)),
    stop_token_ids=rarely(st.lists(wild_integers, max_size=3), st.lists(ids, max_size=3)),
    ignore_eos=st.booleans(),
    num_logprobs=rarely(wild_integers, st.none() | st.integers(0, 20)),
    plain=st.fixed_dictionaries(
        {},
        optional={
            "temperature": rarely(wild_floats, st.floats(0, 100)),
            "top_p": rarely(wild_floats, st.floats(0, 1)),
            "top_k": rarely(wild_integers, st.integers(-1, 300)),
            "min_p": rarely(wild_floats, st.floats(0, 1)),
            "repetition_penalty": rarely(wild_floats, st.floats(0.01, 100)),
            "presence_penalty": rarely(wild_floats, st.floats(-2, 2)),
            "frequency_penalty": rarely(wild_floats, st.floats(-2, 2)),
        },
    ),
)


def test_accepted_requests_reach_workers() -> None:
    config = RouterConfig("nowhere", "fake", MAX_MODEL_LEN)
    frontend = Frontend(Router(config, LeastLoaded()), ByteTokenizer(), config)  # type: ignore[arg-type]
    num_let_in = 0

    def begun(prompt: Any, options: SamplingOptions, num_outputs: int, cache_namespace: str, **fields: Any) -> Any:
        tokenized = asyncio.run(frontend.tokenize(prompt, frontend.cache_namespace("", cache_namespace, BASE_MODEL)))
        sampling = frontend.sampling_params(options, tokenized, 128)
        return frontend.begin(RequestSpec(tokenized, sampling, **fields), num_outputs)[-1].tracker

    @settings(max_examples=NUM_EXAMPLES)
    @given(
        prompt=rarely(
            wild_text | st.lists(wild_integers, max_size=5), st.text(max_size=20) | st.lists(ids, max_size=20)
        ),
        options=any_options,
        num_outputs=st.integers(1, 3),
        priority=st.integers(-(2**31), 2**31 - 1),
        cache_namespace=rarely(wild_text, st.text(max_size=5)),
        session_id=rarely(wild_text, st.text(max_size=5)),
        client_request_id=rarely(wild_text, st.text(max_size=5)),
    )
    def check(**request: Any) -> None:
        nonlocal num_let_in
        try:
            tracker = begun(**request)
        except InvalidRequestError as error:
            assert str(error) and "\n" not in str(error)
            return
        num_let_in += 1
        messages: tuple[Admit, Prefill] = tracker.begin_attempt("p", "d", 1.0)
        assert travelled(list(messages)) == list(messages)
        # The id is echoed to the client.
        pb.GenerateResponse(request_id=request["client_request_id"])

    check()
    assert num_let_in > 10
