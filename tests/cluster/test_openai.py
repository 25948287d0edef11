"""The stock OpenAI client against a cluster."""

import json
import random
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.cluster.conftest import VOCAB_SIZE, Oracle, ServedCluster, wait_until
from tests.cluster.wire import http

MODEL = "tiny-llama"
PROMPT = "The old lighthouse stood"


@pytest.fixture
def client(tiny_pd: ServedCluster) -> Iterator[openai.OpenAI]:
    address = tiny_pd.cluster.addresses.http
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=30.0) as client:
        yield client


def greedy_text(oracle: Oracle, prompt: str, max_tokens: int) -> str:
    prompt_ids = oracle.tokenizer.encode(prompt).ids
    return oracle.decode(oracle.generate(prompt_ids, max_tokens, ignore_eos=True))


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    """Complete greedily and at full length by default."""
    extra_body = {"ignore_eos": True, **options.pop("extra_body", {})}
    return client.completions.create(
        model=MODEL, prompt=prompt, **{"max_tokens": 12, "temperature": 0, "extra_body": extra_body, **options}
    )


def chat(client: openai.OpenAI, content: str = "hello", **options: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": content}],
        **{"max_completion_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}, **options},
    )


def test_models_are_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL == client.models.retrieve(MODEL).id
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here"):
        client.models.retrieve("gpt-9")


def test_completion_matches_the_model(client: openai.OpenAI, tiny_oracle: Oracle) -> None:
    answer = complete(client)
    (choice,) = answer.choices
    assert choice.text == greedy_text(tiny_oracle, PROMPT, 12)
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("length", 0, None)
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 12)
    assert answer.usage.total_tokens == len(PROMPT) + 12


def test_default_output_limits(client: openai.OpenAI) -> None:
    assert complete(client, max_tokens=openai.omit).usage.completion_tokens == 16
    usage = chat(client, max_completion_tokens=openai.omit).usage
    assert usage.total_tokens == 512


@pytest.mark.parametrize("kind", ["strings", "token ids", "lists of token ids"])
def test_every_kind_of_prompt(client: openai.OpenAI, tiny_oracle: Oracle, kind: str) -> None:
    texts = [PROMPT, "Grüße 🙂"]
    ids = [tiny_oracle.tokenizer.encode(text).ids for text in texts]
    prompt: Any = {"strings": texts, "token ids": ids[0], "lists of token ids": ids}[kind]
    answer = complete(client, prompt)
    expected = [greedy_text(tiny_oracle, text, 12) for text in texts[: len(answer.choices)]]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    assert answer.usage.prompt_tokens == sum(map(len, ids[: len(expected)]))


def test_echo_prepends_the_prompt(client: openai.OpenAI, tiny_oracle: Oracle) -> None:
    expected = PROMPT + greedy_text(tiny_oracle, PROMPT, 12)
    assert complete(client, echo=True).choices[0].text == expected
    assert "".join(c.choices[0].text for c in complete(client, echo=True, stream=True)) == expected
    ids = tiny_oracle.tokenizer.encode(PROMPT).ids
    assert complete(client, ids, echo=True).choices[0].text == expected


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stop", [None, "\x00never"])
def test_streamed_text_equals_unstreamed_text(client: openai.OpenAI, n: int, stop: str | None) -> None:
    options: dict[str, Any] = {"n": n, "seed": 7, "temperature": 1.5, "max_tokens": 40, "stop": stop}
    whole = [choice.text for choice in complete(client, **options).choices]
    texts = [""] * n
    reasons: dict[int, str] = {}
    for chunk in complete(client, stream=True, **options):
        assert chunk.object == "text_completion"
        (choice,) = chunk.choices
        assert choice.index not in reasons
        texts[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert texts == whole
    assert reasons == dict.fromkeys(range(n), "length")


def test_chat_streamed_and_not(client: openai.OpenAI, tiny_oracle: Oracle) -> None:
    prompt = "<system>be brief<user>hello<assistant>"
    expected = greedy_text(tiny_oracle, prompt, 12)
    answer = chat(client)
    assert answer.object == "chat.completion"
    message = answer.choices[0].message
    assert (message.role, message.content, answer.choices[0].finish_reason) == ("assistant", expected, "length")
    assert answer.usage.prompt_tokens == len(prompt)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == expected
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_content_may_come_in_parts(client: openai.OpenAI) -> None:
    def ask(content: Any) -> str:
        return (
            client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=5, temperature=0
            )
            .choices[0]
            .message.content
            or ""
        )

    assert ask([{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]) == ask("hello")


def test_fields_of_other_servers_are_accepted(client: openai.OpenAI) -> None:
    unknown = {"nonsense": 1, "length_penalty": 1.0, "use_beam_search": False, "user": "u"}
    plain = chat(client).choices[0].message.content
    answer = chat(client, reasoning_effort="low", store=True, extra_body={"ignore_eos": True, **unknown})
    assert answer.choices[0].message.content == plain
    messages: Any = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
        {**answer.choices[0].message.model_dump(), "content": None},
        {"role": "user", "content": "hello", "name": "Al"},
    ]
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=messages, max_tokens=5, extra_headers={"X-Request-Id": "mine"}
    )
    assert answer.headers["x-request-id"] == "mine"
    parsed = answer.parse()
    assert (parsed.id, parsed._request_id) == ("chatcmpl-mine", "mine")
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    assert [chunk.usage.completion_tokens for chunk in chunks][-2:] == [12, 12]


def test_seed_is_reproducible_and_choices_differ(client: openai.OpenAI) -> None:
    def texts(**options: Any) -> list[str]:
        return [choice.text for choice in complete(client, temperature=1.0, **options).choices]

    several = texts(seed=11, n=4)
    assert several == texts(seed=11, n=4)
    assert len(set(several)) == 4
    assert texts(seed=11) == several[:1]
    assert texts(seed=12) == several[1:2]
    assert texts(seed=0) == texts(seed=0) != texts(seed=-1) == texts(seed=-1)
    assert texts() != texts()


def test_a_stop_string_ends_the_text_and_never_shows(client: openai.OpenAI, tiny_oracle: Oracle) -> None:
    text = greedy_text(tiny_oracle, PROMPT, 30)
    stop = text[10:14]
    expected = text[: text.index(stop)]
    for options in ({"stop": stop}, {"stop": ["\x00never", stop]}):
        choice = complete(client, max_tokens=30, **options).choices[0]
        assert (choice.text, choice.finish_reason) == (expected, "stop")
        streamed = ""
        for chunk in complete(client, max_tokens=30, stream=True, **options):
            streamed += chunk.choices[0].text
            assert expected.startswith(streamed)
        assert streamed == expected


def test_logprobs_match_the_model(client: openai.OpenAI, tiny_oracle: Oracle) -> None:
    import torch

    prompt_ids = tiny_oracle.tokenizer.encode(PROMPT).ids
    output_ids = tiny_oracle.generate(prompt_ids, 6, ignore_eos=True)
    expected = torch.log_softmax(tiny_oracle.logits([*prompt_ids, *output_ids])[len(prompt_ids) - 1 : -1], -1)
    chosen = [row[i].item() for row, i in zip(expected, output_ids, strict=True)]
    logprobs = complete(client, max_tokens=6, logprobs=3).choices[0].logprobs
    assert logprobs.token_logprobs == pytest.approx(chosen, abs=1e-3)
    assert [max(top.values()) for top in logprobs.top_logprobs] == pytest.approx(chosen, abs=1e-3)
    assert logprobs.text_offset[0] == 0 and logprobs.text_offset == sorted(logprobs.text_offset)
    content = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(content) == 12
    assert all(len(entry.top_logprobs) == 2 and entry.top_logprobs[0].logprob >= entry.logprob for entry in content)
    message = chat(client).choices[0].message.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace") == message
    streamed = [
        entry
        for chunk in chat(client, logprobs=True, top_logprobs=2, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_usage_reports_cached_tokens(client: openai.OpenAI) -> None:
    prompt = [random.Random(5).randrange(VOCAB_SIZE) for _ in range(100)]
    cached = [complete(client, prompt, max_tokens=1).usage.prompt_tokens_details.cached_tokens for _ in range(2)]
    assert cached == [0, 96]


def test_logit_bias_changes_the_choice(client: openai.OpenAI) -> None:
    answer = complete(client, max_tokens=3, logit_bias={"65": 100})
    assert len(set(answer.choices[0].text)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": [VOCAB_SIZE]}, f"token id {VOCAB_SIZE} is outside the vocabulary"),
        ({"prompt": "x" * 600}, "600 tokens > 511 maximum; the maximum context length is 512 tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 500}, "max_tokens must be between 1 and"),
        ({"temperature": -1}, "temperature"),
        ({"n": 129}, "n: "),
        ({"logprobs": 21}, "logprobs"),
        ({"suffix": "end"}, "suffix is not supported"),
        ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs"),
        ({"stop": ["x"] * 17}, "stop must be at most 16 strings"),
        ({"stop": ""}, "stop strings must have 1 to 1024 characters"),
        ({"extra_body": {"use_beam_search": True}}, "beam search is not supported"),
    ],
)
def test_bad_input_is_a_client_error(client: openai.OpenAI, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        complete(client, **options)
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    "options",
    [
        {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
        {"tool_choice": "required"},
        {"response_format": {"type": "yaml"}},
        {"functions": [{"name": "f"}]},
        {"modalities": ["audio"]},
        {"top_logprobs": 2},
        {"max_tokens": 3},
    ],
)
def test_unsupported_chat_fields_are_refused(client: openai.OpenAI, options: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        chat(client, **options)


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="model 'gpt-9' is not served here; 'tiny-llama' is"):
        client.completions.create(model="gpt-9", prompt="x")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_disconnect_frees_both_workers(tiny_pd: ServedCluster, client: openai.OpenAI, stream: bool, n: int) -> None:
    before = tiny_pd.integrity()["decode-0"].stats.output_tokens_computed
    if stream:
        answer = complete(client, max_tokens=480, stream=True, n=n)
        next(iter(answer))
        answer.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            complete(client.with_options(timeout=0.1), max_tokens=480, n=n)
    wait_until(lambda: not tiny_pd.client.server_info().num_requests, 2.0, "the request is forgotten")
    tiny_pd.wait_clean()
    assert tiny_pd.integrity()["decode-0"].stats.output_tokens_computed - before < 480 * n


def test_prompt_scoring_for_evaluation_harnesses(client: openai.OpenAI, tiny_oracle: Oracle) -> None:
    rng = random.Random(31)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (70, 9)]
    for max_tokens, n in ((1, 1), (0, 1), (1, 2)):
        answer = complete(client, prompts, max_tokens=max_tokens, n=n, echo=True, logprobs=1)
        assert len(answer.choices) == 2 * n
        for choice in answer.choices:
            prompt_ids = prompts[choice.index // n]
            rows = tiny_oracle.logits(prompt_ids).log_softmax(-1)
            first, *logprobs = choice.logprobs.token_logprobs
            assert first is None and len(logprobs) == len(prompt_ids) - 1 + max_tokens
            for i in range(1, len(prompt_ids)):
                row, own = rows[i - 1], float(rows[i - 1, prompt_ids[i]])
                assert logprobs[i - 1] == pytest.approx(own, abs=1e-4)
                # Greedy means that each token is the most likely one.
                is_greedy = logprobs[i - 1] == max(choice.logprobs.top_logprobs[i].values())
                assert is_greedy == (int(row.argmax()) == prompt_ids[i])
        assert answer.usage.completion_tokens == 2 * n * max_tokens


def test_tokenize_then_generate(tiny_pd: ServedCluster, tiny_oracle: Oracle) -> None:
    def post(path: str, body: dict[str, Any]) -> Any:
        answer = http(tiny_pd, "POST", path, json.dumps(body).encode(), {"content-type": "application/json"})
        assert answer.status == 200, answer.body
        return answer.json

    tokens = post("/tokenize", {"prompt": PROMPT})["tokens"]
    assert tokens == tiny_oracle.tokenizer.encode(PROMPT).ids
    assert post("/detokenize", {"tokens": tokens}) == {"prompt": PROMPT}
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    for prompt in ({"text": PROMPT}, {"input_ids": tokens}):
        answer = post("/generate", {**prompt, "sampling_params": sampling})
        assert answer["text"] == greedy_text(tiny_oracle, PROMPT, 12)
        assert answer["meta_info"]["completion_tokens"] == 12
    assert http(tiny_pd, "POST", "/reset_prefix_cache").status == 404
