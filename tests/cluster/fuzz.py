"""Random requests for the fuzz tests."""

import math
from typing import Any

from hypothesis import strategies as st

from tandem.v1 import inference_pb2 as pb
from tests.cluster.conftest import MAX_MODEL_LEN, VOCAB_SIZE

UINT32_LIMITS = [0, 1, 2**31, 2**32 - 1]
# Appended to shorten a request: of a repeated field, protobuf takes the last.
SHORT = pb.GenerateRequest(sampling=pb.SamplingParams(max_tokens=2)).SerializeToString()


def often(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


def mostly(good: st.SearchStrategy[Any], *others: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Keep one bad field from hiding the handling of others."""
    return st.integers(0, 19).flatmap(lambda number: st.one_of(*others) if number == 0 else good)


def number(low: float, high: float) -> st.SearchStrategy[float]:
    inside = st.floats(low, high, width=32) | often(low, high)
    return mostly(inside, st.floats(width=32), often(math.nan, math.inf, -math.inf, -0.0, 1e-45, 3.4e38))


uint32s = st.integers(0, 2**32 - 1) | often(*UINT32_LIMITS)
int32s = st.integers(-(2**31), 2**31 - 1) | often(-(2**31), -2, -1, 0, 1, 2**31 - 1)
token_ids = mostly(st.integers(0, VOCAB_SIZE - 1), st.just(VOCAB_SIZE), uint32s)
odd_texts = often("", "\0", "\n", "x" * 600, "\N{SLIGHTLY SMILING FACE}" * 70, "<eos256>", "r" * 256, "r" * 257)
texts = st.text(min_size=1, max_size=20)

sampling = st.builds(
    lambda fields: pb.SamplingParams(**fields),
    st.fixed_dictionaries(
        {"max_tokens": mostly(often(1, 2, 3, 4), often(0, MAX_MODEL_LEN), uint32s)},
        optional={
            "temperature": number(0.0, 3.0),
            "top_p": number(0.0, 1.0),
            "min_p": number(0.0, 1.0),
            "repetition_penalty": number(0.015625, 100.0),
            "presence_penalty": number(-2.0, 2.0),
            "frequency_penalty": number(-2.0, 2.0),
            "top_k": mostly(st.integers(-1, VOCAB_SIZE + 5), int32s),
            "seed": st.integers(0, 2**64 - 1) | often(0, 2**63, 2**64 - 1),
            "logit_bias": st.dictionaries(token_ids, number(-100.0, 100.0), max_size=4),
            "stop": mostly(st.lists(texts, max_size=3), st.lists(odd_texts, max_size=18)),
            "stop_token_ids": st.lists(token_ids, max_size=4),
            "ignore_eos": st.booleans(),
            "logprobs": mostly(st.integers(0, 20), uint32s),
            "prompt_logprobs": mostly(st.integers(-1, 20), int32s),
            "min_tokens": mostly(often(0, 1), uint32s),
        },
    ),
)
prompts: st.SearchStrategy[dict[str, Any]] = mostly(
    st.one_of(
        st.builds(lambda text: {"text": text}, mostly(texts, odd_texts)),
        st.builds(
            lambda ids: {"token_ids": pb.TokenIds(ids=ids)},
            st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=60),
        ),
        st.builds(
            lambda messages: {"chat": pb.Chat(messages=messages)},
            st.lists(
                st.builds(pb.ChatMessage, role=often("user", "system") | odd_texts, content=texts | odd_texts),
                min_size=1,
                max_size=4,
            ),
        ),
    ),
    st.just({}),
    st.builds(lambda ids: {"token_ids": pb.TokenIds(ids=ids)}, st.lists(uint32s, max_size=5)),
    st.just({"chat": pb.Chat()}),
)
requests = st.builds(
    lambda prompt, **fields: pb.GenerateRequest(**prompt, **fields),
    prompts,
    request_id=mostly(texts, odd_texts),
    model=mostly(often("", "tiny-llama"), texts, odd_texts),
    sampling=sampling,
    priority=int32s,
    cache_namespace=mostly(texts, odd_texts),
    session_id=mostly(texts, odd_texts),
)


embed_inputs = mostly(
    st.builds(lambda text: pb.EmbedInput(text=text), mostly(texts, odd_texts)),
    st.builds(lambda ids: pb.EmbedInput(token_ids=pb.TokenIds(ids=ids)), st.lists(token_ids, max_size=60)),
    st.just(pb.EmbedInput()),
)
embed_requests = st.builds(
    lambda inputs, options: pb.EmbedRequest(inputs=inputs, **options),
    mostly(st.lists(embed_inputs, min_size=1, max_size=5), st.just([])),
    st.fixed_dictionaries(
        {},
        optional={
            "request_id": mostly(texts, odd_texts),
            "model": mostly(often("", "tiny-llama"), texts, odd_texts),
            "normalize": st.booleans(),
            "dimensions": mostly(st.just(64), uint32s),
            "truncate_prompt_tokens": mostly(st.integers(1, MAX_MODEL_LEN) | st.just(-1), int32s),
            "keep_last_tokens": st.booleans(),
            "priority": int32s,
            "cache_namespace": mostly(texts, odd_texts),
        },
    ),
)


@st.composite
def mutated(draw: st.DrawFn, originals: st.SearchStrategy[bytes]) -> bytes:
    data = bytearray(draw(originals))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 8)))
        data[start:end] = draw(
            st.binary(max_size=8) | st.just(b"") | st.just(bytes(data[start:end] * 2)) | st.just(b"\xff" * 10)
        )
    return bytes(data)


bytes_of_requests = mutated(requests.map(lambda request: request.SerializeToString())).map(lambda data: data + SHORT)
bytes_of_embed_requests = mutated(embed_requests.map(lambda request: request.SerializeToString()))
random_bytes = st.binary(max_size=60).map(lambda data: data + SHORT)
