"""Other servers' fields: accepted where they change nothing, else refused."""

import time
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from tandem.router.frontends.openai.errors import invalid_body
from tandem.router.frontends.openai.lenient import MAX_NAME_CHARACTERS, MAX_NAMED, UnknownFields
from tandem.router.frontends.openai.schema import CompletionRequest
from tandem.router.frontends.openai.tools_schema import ChatRequest

USER = {"role": "user", "content": "hi"}


def read(**fields: Any) -> CompletionRequest | ChatRequest:
    """Reads a body; with messages it is a chat."""
    kind = ChatRequest if "messages" in fields else CompletionRequest
    return kind.model_validate(fields if "messages" in fields else {"prompt": "hi", **fields})


def refusal(**fields: Any) -> str:
    with pytest.raises(ValidationError) as invalid:
        read(**fields)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in invalid.value.errors()]
    return str(invalid_body(RequestValidationError(errors)))


def chat(*more: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [USER, *more], **fields}


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_null_is_absent_for_every_optional_field(kind: type[CompletionRequest | ChatRequest]) -> None:
    required: dict[str, Any] = {"prompt": "hi"} if kind is CompletionRequest else {"messages": [USER]}
    optional = {field.alias or name for name, field in kind.model_fields.items() if not field.is_required()}
    nulls = dict.fromkeys(optional | kind.unserved.keys() | kind.hints)
    body = kind.model_validate({**nulls, **required})
    assert body == kind.model_validate(required)
    assert body.unknown_fields == UnknownFields()
    for inner in ({"stream_options": {"include_usage": None}}, {"structured_outputs": {"json": None, "backend": None}}):
        assert kind.model_validate({**required, **inner}).unknown_fields == UnknownFields()


@pytest.mark.parametrize(
    "fields",
    [
        {"length_penalty": 1.0, "use_beam_search": False, "best_of": 1, "suffix": "", "min_tokens": 0},
        {"skip_special_tokens": True, "spaces_between_special_tokens": False, "include_stop_str_in_output": False},
        {"logits_processors": [], "bad_words": [], "add_special_tokens": True, "return_token_ids": False},
        {"user": {"any": "thing"}, "metadata": {"n": 1}, "request_id": "r-1", "rid": ["r"], "repeat_penalty": 1},
        {"stream_options": {"include_usage": True}},
        {"keep_alive": "5m", "num_gpu": 1, "options": {}, "raw": False, "format": "", "num_predict": None},
        {"structured_outputs": {"regex": "a", "backend": "xgrammar", "disable_any_whitespace": False}},
        chat(reasoning_effort="low", verbosity="high", prompt_cache_key="k", prompt_cache_retention="24h"),
        chat(safety_identifier="s", store=True, service_tier="flex", prediction={"type": "content", "content": "x"}),
        chat(tools=[], tool_choice="none", functions=[], parallel_tool_calls=True, documents=[], echo=False),
        chat(add_generation_prompt=True, continue_final_message=False, chat_template_kwargs={}, logprobs=False),
        chat({"role": "assistant", "content": None, "refusal": None, "audio": None, "annotations": []}),
        chat({"role": "assistant", "content": "yes", "tool_calls": [], "function_call": None, "name": "Al"}),
        chat({"role": "assistant", "reasoning_content": "so", "provider_specific_fields": {"x": 1}}),
        chat({"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}),
        chat({"role": "user", "content": [{"type": "input_text", "text": "a"}]}),
    ],
    ids=lambda fields: next(reversed(fields)),
)
def test_what_changes_nothing_is_taken_as_if_it_were_not_there(fields: dict[str, Any]) -> None:
    assert read(**fields).unknown_fields == UnknownFields()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_beam_search": True}, "use_beam_search: beam search is not supported by this server"),
        ({"use_beam_search": 0}, "use_beam_search: beam search is not supported by this server"),
        ({"length_penalty": True}, "length_penalty: beam search, which this is for, is not supported by this server"),
        ({"best_of": 3}, "best_of: best_of other than 1 is not supported"),
        ({"max_completion_tokens": 5}, "max_completion_tokens: this field is called max_tokens here"),
        ({"skip_special_tokens": False}, "skip_special_tokens: special tokens are never part of the text here"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids: tokens are not named by ids here"),
        ({"logit_bias": {"x": 1, "7": 1, "007": 2}}, "logit_bias: keys must be token ids, not 'x', '007'"),
        (
            {"logit_bias": {"1": 101, "2": 0, "3": -200}},
            "logit_bias: biases must be between -100 and 100, not 101 of token 1, -200 of token 3",
        ),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1: Input should be a valid number"),
        ({"cache_salt": ""}, "cache_salt: 1 to 128 characters are taken, without '@', '/', '\\' and NUL"),
        ({"cache_salt": "a/b"}, "cache_salt: 1 to 128 characters are taken"),
        ({"cache_salt": "a" * 129}, "cache_salt: 1 to 128 characters are taken"),
        ({"allowed_token_ids": []}, "allowed_token_ids: List should have at least 1 item"),
        ({"allowed_token_ids": [1] * 16385}, "allowed_token_ids: List should have at most 16384 items"),
        ({"logprob_token_ids": [1] * 129}, "logprob_token_ids: List should have at most 128 items"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens: Input should be greater than or equal to -1"),
        ({"truncation_side": "middle"}, "truncation_side: Input should be 'left' or 'right'"),
        ({"num_predict": 5}, "num_predict: this field is called max_tokens here"),
        ({"format": "json"}, "format: this field is called response_format here"),
        ({"options": {"num_predict": 5}}, "options: options are fields of the body here"),
        ({"num_ctx": 4096}, "num_ctx: the model's length is the server's: send only"),
        ({"repeat_last_n": 64}, "repeat_last_n: penalties cover the whole text here"),
        (
            chat(enable_thinking=False),
            "enable_thinking: switches of the chat template are sent in chat_template_kwargs",
        ),
        (chat(previous_response_id="r"), "previous_response_id: conversations are not kept by this API"),
        ({"cache_salt": "a", "cache_namespace": "b"}, "cache_salt: it is another name of cache_namespace"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag: structural tags are not"),
        (chat(web_search_options={}), "web_search_options: searching the web is not supported by this server"),
        (chat(audio={"voice": "x"}), "audio: audio is not supported by this server"),
        (chat(functions=[{}]), "functions: the API of before tools is not supported by this server: use tools"),
        (chat(include_reasoning=False), "include_reasoning: leaving a model's reasoning out of answers"),
        (chat({"role": "user", "content": None}), "messages.1.content: a message of role user needs one"),
        (chat({"role": "system"}), "messages.1.content: a message of role system needs one"),
        (
            chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}),
            "messages.1.content.0.type: images are not supported by this server",
        ),
        (
            chat({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}),
            "messages.1.content.0.type: audio is not supported by this server",
        ),
        ({"top_p": "1"}, "top_p: Input should be a valid number"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage: Input should be a valid boolean"),
    ],
)
def test_what_would_change_the_answer_is_refused_in_words_that_help(fields: dict[str, Any], message: str) -> None:
    assert refusal(**fields).startswith(message)


def test_what_nobody_knows_is_counted_wherever_it_stands() -> None:
    part = {"type": "text", "text": "a", "x": 1}
    body = read(**chat({"role": "user", "content": [part, part], "y": 1}, z=1, stream_options={"w": 1}))
    assert body.unknown_fields.num_fields == 5
    assert set(body.unknown_fields.names) == {"x", "y", "z", "w"}


def test_many_unknown_fields_cost_no_more_than_a_few() -> None:
    many = {f"{'n' * 100}{i}": 1 for i in range(300_000)} | {"prompt": "hi"}
    took_s = []
    for _ in range(5):
        began = time.perf_counter()
        unknown = CompletionRequest.model_validate(many).unknown_fields
        took_s.append(time.perf_counter() - began)
    # It takes 10 µs; a loop over the names would take 10 ms and more.
    assert min(took_s) < 0.002
    assert unknown.num_fields == 300_000
    assert unknown.names == ["n" * MAX_NAME_CHARACTERS] * MAX_NAMED


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_the_description_has_what_is_taken_of_unserved_fields(
    kind: type[CompletionRequest | ChatRequest],
) -> None:
    description = kind.model_json_schema()
    assert "additionalProperties" not in description
    for name, field in kind.unserved.items():
        assert description["properties"][name]["enum"] == [*field.taken, None]
