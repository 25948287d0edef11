"""OpenAI's own package: every field for text models, and every ignored hint."""

import json

import openai
from report import Report

report = Report()
client = openai.OpenAI(base_url=f"{report.url}/v1", api_key="none", max_retries=0)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
HINTS = {
    "reasoning_effort": "low",
    "prompt_cache_key": "a-key",
    "safety_identifier": "someone",
    "verbosity": "low",
    "user": "someone",
    "store": True,
    "metadata": {"experiment": "1"},
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "prediction": None,
    "web_search_options": None,
}
EXTRAS = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "nobody_knows_this": {"a": [1, 2]},
    "top_k": 40,
    "repetition_penalty": 1.1,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}


def chat(**fields: object):
    fields = {"messages": QUESTION, "max_tokens": 16, **fields}
    return client.chat.completions.create(model=report.model, **fields)


def hints() -> None:
    for name, value in HINTS.items():
        try:
            assert chat(**{name: value}).choices[0].finish_reason
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


def extras() -> None:
    for name, value in EXTRAS.items():
        try:
            assert chat(extra_body={name: value}).choices[0].finish_reason
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


def second_turn() -> None:
    first = chat().choices[0].message
    messages = [*QUESTION, first.model_dump(), {"role": "user", "content": "And of Italy?", "name": "someone"}]
    assert chat(messages=messages).choices[0].message.content
    # Some clients keep the dump with nulls, as above; others keep the object.
    messages[1] = first
    assert chat(messages=messages).choices[0].message.content


def developer() -> None:
    instructions = "You are a pirate."
    asked = {"temperature": 0, "seed": 1}
    as_system, as_developer = (
        chat(messages=[{"role": role, "content": instructions}, *QUESTION], **asked) for role in ("system", "developer")
    )
    assert as_system.choices[0].message.content == as_developer.choices[0].message.content
    assert as_system.usage.prompt_tokens == as_developer.usage.prompt_tokens


def image() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    try:
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}])
    except openai.BadRequestError as error:
        assert "image" in error.message
    else:
        raise AssertionError("an image was taken")


def cached_part() -> None:
    part = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    assert chat(messages=[{"role": "user", "content": [part]}]).choices


def stream_usage() -> None:
    chunks = list(
        chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False}, temperature=0)
    )
    assert chunks[-1].usage.completion_tokens > 0
    assert not chunks[-1].choices


def continuous_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(stream=True, extra_body={"stream_options": options}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] > 0


def json_object() -> None:
    answer = chat(response_format={"type": "json_object"}, max_tokens=400, temperature=0)
    choice = answer.choices[0]
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


def json_schema() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    answer = chat(response_format=wanted, max_tokens=200)
    assert set(json.loads(answer.choices[0].message.content)) == {"city", "population"}


def tool_auto() -> None:
    answer = chat(tools=[TOOL], max_tokens=64)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def tool_required() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        message = chat(tools=[TOOL], tool_choice=choice, max_tokens=200).choices[0].message
        assert set(json.loads(message.tool_calls[0].function.arguments)) == {"city"}
        assert message.tool_calls[0].function.name == "get_weather"


def tool_streamed() -> None:
    name = arguments = ""
    for chunk in chat(tools=[TOOL], tool_choice="required", max_tokens=200, stream=True, parallel_tool_calls=False):
        for call in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert name == "get_weather"
    assert set(json.loads(arguments)) == {"city"}


def tool_result() -> None:
    called = chat(tools=[TOOL], tool_choice="required", max_tokens=200, parallel_tool_calls=False).choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "Sunny."}
    for message in (called, called.model_dump(), called.model_dump(exclude_none=True)):
        assert chat(messages=[*QUESTION, message, result], tools=[TOOL]).choices[0].finish_reason


def logprobs() -> None:
    answer = chat(logprobs=True, top_logprobs=3)
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens


def several() -> None:
    assert len(chat(n=3, seed=7, stop=["\n\n"], presence_penalty=0.5, frequency_penalty=0.5).choices) == 3


def completion_echo() -> None:
    answer = client.completions.create(
        model=report.model, prompt="The capital of France is", max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    scores = answer.choices[0].logprobs.token_logprobs
    assert scores[0] is None
    assert all(score < 0 for score in scores[1:])


def token_ids() -> None:
    """Tokens in, tokens out: a second turn goes on with exactly the first's."""
    asked = {"model": report.model, "max_tokens": 8, "temperature": 0, "extra_body": {"return_token_ids": True}}
    first = client.completions.create(prompt=[504, 3575, 282, 4649, 314], **asked)
    assert first.choices[0].prompt_token_ids == [504, 3575, 282, 4649, 314]
    ids = [*first.choices[0].prompt_token_ids, *first.choices[0].token_ids]
    assert len(first.choices[0].token_ids) == first.usage.completion_tokens == 8
    second = client.completions.create(prompt=ids, **asked)
    assert second.choices[0].prompt_token_ids == ids
    answer = chat(temperature=0, extra_body={"return_token_ids": True})
    chunks = list(chat(temperature=0, stream=True, extra_body={"return_token_ids": True}))
    assert chunks[0].prompt_token_ids == answer.prompt_token_ids
    streamed = [i for chunk in chunks for i in getattr(chunk.choices[0], "token_ids", None) or []]
    assert streamed == answer.choices[0].token_ids


def chosen_tokens() -> None:
    allowed = [30, 31, 32]
    fields = {"allowed_token_ids": allowed, "logprob_token_ids": [40, 41, 30], "return_token_ids": True}
    for temperature in (0, 1):
        choice = chat(max_tokens=6, temperature=temperature, logprobs=True, extra_body=fields).choices[0]
        assert len(choice.token_ids) == 6
        assert set(choice.token_ids) <= set(allowed)
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [3] * 6


def truncated() -> None:
    long = "word " * 20_000
    for side in ("left", "right"):
        fields = {"truncate_prompt_tokens": 50, "truncation_side": side}
        answer = client.completions.create(model=report.model, prompt=long, max_tokens=1, extra_body=fields)
        assert answer.usage.prompt_tokens == 50


def continued() -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "The capital of"}]
    answer = chat(messages=messages, temperature=0, extra_body={"continue_final_message": True, "echo": True})
    assert answer.choices[0].message.content.startswith("The capital of ")


def other_role() -> None:
    messages = [*QUESTION, {"role": "critic", "content": "Be brief."}]
    assert chat(messages=messages).choices[0].message.content


def wrong_biases() -> None:
    try:
        chat(logit_bias={"x": 1, "5": 1, "y": 2})
    except openai.BadRequestError as error:
        assert "'x'" in error.message
        assert "'y'" in error.message
    else:
        raise AssertionError("wrong keys were taken")


def invocation() -> None:
    answer = openai.OpenAI(base_url=report.url, api_key="none").post(
        "/invocations", cast_to=object, body={"messages": QUESTION, "max_tokens": 4}
    )
    assert answer["object"] == "chat.completion"


def too_long() -> None:
    for call in (
        lambda: chat(messages=[{"role": "user", "content": "word " * 20_000}]),
        lambda: client.responses.create(model=report.model, input="word " * 20_000),
    ):
        try:
            call()
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded"
            assert "maximum context length is 8192 tokens" in error.message
        else:
            raise AssertionError("the prompt was taken")


def format_with_call() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    message = chat(tools=[TOOL], tool_choice="required", response_format=wanted, max_tokens=200).choices[0].message
    assert message.tool_calls
    assert message.content is None


def open_schema() -> None:
    schema = {name: value for name, value in SCHEMA.items() if name != "additionalProperties"}
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = chat(response_format=wanted, max_tokens=200)
    assert set(json.loads(answer.choices[0].message.content)) == {"city", "population"}


def responses() -> None:
    first = client.responses.create(model=report.model, input="Say hello.", max_output_tokens=16)
    assert first.output_text
    second = client.responses.create(
        model=report.model, input="Again.", previous_response_id=first.id, max_output_tokens=16
    )
    assert second.usage.input_tokens > first.usage.input_tokens


def responses_streamed() -> None:
    events = list(client.responses.create(model=report.model, input="Say hello.", max_output_tokens=16, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert text == events[-1].response.output_text


def models() -> None:
    names = [model.id for model in client.models.list()]
    assert report.model in names
    assert client.models.retrieve(report.model).id == report.model


def request_id() -> None:
    answer = client.chat.completions.with_raw_response.create(
        model=report.model, messages=QUESTION, max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert answer.headers["x-request-id"] == "mine-1"


def embeddings() -> None:
    texts = ["The capital of France is Paris.", "Paris is the capital of France.", "I like noodles."]
    answer = client.embeddings.create(model=report.model, input=texts)
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 10
    first, second, third = [item.embedding for item in answer.data]
    product = lambda a, b: sum(x * y for x, y in zip(a, b, strict=True))  # noqa: E731
    assert abs(product(first, first) - 1) < 1e-4 and product(first, second) > product(first, third)
    plain = client.embeddings.create(model=report.model, input=texts[0], encoding_format="float", user="someone")
    assert product(plain.data[0].embedding, first) > 0.999
    ids = client.embeddings.create(model=report.model, input=[[1, 2, 3], [4]])
    assert ids.usage.prompt_tokens == 4
    try:
        client.embeddings.create(model=report.model, input=texts, dimensions=8)
    except openai.BadRequestError as error:
        assert error.param == "dimensions"
    else:
        raise AssertionError("a plain model's embeddings were cut")
    short = client.embeddings.create(model=report.model, input=texts[0], extra_body={"truncate_prompt_tokens": 2})
    assert short.usage.prompt_tokens == 2


for what, attempt in {
    "models": models,
    "hints without effect": hints,
    "fields of other servers": extras,
    "a second turn": second_turn,
    "developer is system": developer,
    "an image is refused with words": image,
    "cache_control of a part": cached_part,
    "usage in streams": stream_usage,
    "usage in every chunk": continuous_usage,
    "json_object": json_object,
    "json_schema": json_schema,
    "tools, auto": tool_auto,
    "tools, required and named": tool_required,
    "tools, streamed": tool_streamed,
    "tools, a result": tool_result,
    "log probabilities": logprobs,
    "several outputs": several,
    "echo with log probabilities": completion_echo,
    "token ids in and out": token_ids,
    "allowed and named tokens": chosen_tokens,
    "truncated prompts": truncated,
    "a continued message with echo": continued,
    "another role": other_role,
    "all wrong keys of logit_bias": wrong_biases,
    "/invocations": invocation,
    "a prompt that is too long is known as that": too_long,
    "a forced call with a format": format_with_call,
    "a schema without additionalProperties is closed": open_schema,
    "embeddings": embeddings,
    "responses": responses,
    "responses, streamed": responses_streamed,
    "request id": request_id,
}.items():
    report.check(what, attempt)
report.end()
