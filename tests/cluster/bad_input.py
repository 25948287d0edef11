"""Rows of docs/bad-input.md, for the tiny model: 300 tokens, maximum length 512, page size 16."""

import json
import math
from dataclasses import dataclass
from typing import Any

from tandem.v1 import inference_pb2 as pb

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE, SGLANG = "/tokenize", "/detokenize", "/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
EMBEDDINGS = "/v1/embeddings"
JSON = "application/json"
# The default of --max-body-bytes.
MAX_BODY_BYTES = 8 * 2**20
NUM_LARGE_BYTES = 50 * 2**20


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@dataclass(frozen=True)
class Row:
    """
    Attributes:
        message: gRPC error message; also over HTTP unless http_message is set.
        grpc, http: request or body, possibly raw bytes; None if inexpressible there.
        code, param: fields of the HTTP error object.
    """

    name: str
    message: str
    grpc: pb.GenerateRequest | pb.EmbedRequest | bytes | None = None
    http: dict[str, Any] | bytes | None = None
    http_message: str = ""
    grpc_code: str = "INVALID_ARGUMENT"
    status: int = 400
    code: str | None = None
    param: str | None = None
    path: str = COMPLETIONS
    content_type: str = JSON

    @property
    def embeds(self) -> bool:
        return isinstance(self.grpc, pb.EmbedRequest)

    @property
    def grpc_bytes(self) -> bytes:
        assert self.grpc is not None
        return self.grpc if isinstance(self.grpc, bytes) else self.grpc.SerializeToString()

    @property
    def http_bytes(self) -> bytes:
        # json.dumps escapes to ASCII, so the body can hold lone surrogates.
        return self.http if isinstance(self.http, bytes) else json.dumps(self.http).encode()


def ids(*token_ids: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids))


def sampled(**sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(**sampling))


def both(name: str, value: Any, message: str, http_message: str, *, field: str = "") -> Row:
    field = field or name.split()[0]
    http_value = {str(k): v for k, v in value.items()} if isinstance(value, dict) else value
    http = {"prompt": "hi", field: http_value}
    return Row(name, message, sampled(**{field: value}), http, http_message, param=field)


def http_only(name: str, message: str, http: dict[str, Any] | bytes, param: str | None = None, **more: Any) -> Row:
    if isinstance(http, dict) and "messages" not in http:
        http = {"prompt": "hi", **http}
    return Row(name, message, http=http, param=param, **more)


def raw_number(name: str, literal: str, value: float) -> Row:
    """Build a row whose temperature is no JSON number."""
    return Row(
        name,
        f"temperature must be a number of at least 0, not {value:g}",
        sampled(temperature=value),
        b'{"prompt": "hi", "temperature": %s}' % literal.encode(),
        f"the body is not valid JSON: {literal} is no number there",
    )


def too_long(found: str) -> str:
    return (
        f"the prompt is too long: {found}; this model's maximum context length is 512 tokens, the output's first token "
        "included"
    )


def surrogate(where: str, path: str = COMPLETIONS, **fields: Any) -> Row:
    return http_only(f"half a character in {where}", HALF, fields, path=path)


OVERFLOW = "context_length_exceeded"
HALF = "the body holds a lone surrogate, which is half a character"
MALFORMED = "the request is malformed: no message of its type, or text that is not UTF-8"
NOT_AN_OBJECT = "the body must be a JSON object, sent as application/json"
EMPTY, TOO_LONG = (
    "the prompt is empty",
    too_long("600 tokens > 511 maximum"),
)

PROMPTS = [
    Row("empty prompt", EMPTY, pb.GenerateRequest(text=""), {"prompt": ""}, param="prompt"),
    Row("empty list of token ids", EMPTY, ids(), {"prompt": []}, param="prompt"),
    Row(
        "no prompt",
        "a prompt is needed: text, token_ids or chat",
        pb.GenerateRequest(),
        {},
        "prompt: Field required",
        param="prompt",
    ),
    Row(
        "chat without messages",
        "the chat has no messages",
        pb.GenerateRequest(chat=pb.Chat()),
        {"messages": []},
        "messages: List should have at least 1 item after validation, not 0",
        param="messages",
        path=CHATS,
    ),
    Row(
        "chat with more messages than fit",
        too_long("512 messages cannot fit"),
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage()] * 512)),
        {"messages": [{"role": "user", "content": ""}] * 512},
        param="messages",
        path=CHATS,
        code=OVERFLOW,
    ),
    Row(
        "chat with more than 2048 messages",
        "the chat has 2049 messages; at most 2048 are taken",
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage()] * 2049)),
        {"messages": [{"role": "user", "content": ""}] * 2049},
        "messages: List should have at most 2048 items after validation, not 2049",
        param="messages",
        path=CHATS,
    ),
    Row(
        "chat with 100,000 messages",
        "the chat has more than 2048 messages",
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage()] * 100_000)),
        {"messages": [{"role": "user", "content": ""}] * 100_000},
        "messages: at most 2048 items are taken",
        param="messages",
        path=CHATS,
    ),
    Row(
        "a million token ids",
        too_long("1000004 bytes of token ids cannot fit"),
        ids(*[1] * 1_000_000),
        {"prompt": [1] * 1_000_000},
        "prompt: at most 311296 items are taken",
        param="prompt",
    ),
    Row(
        "prompt too long",
        TOO_LONG,
        pb.GenerateRequest(text="x" * 600),
        {"prompt": "x" * 600},
        param="prompt",
        code=OVERFLOW,
    ),
    Row("too many token ids", TOO_LONG, ids(*[1] * 600), {"prompt": [1] * 600}, param="prompt", code=OVERFLOW),
    Row(
        "prompt too long to tokenize",
        too_long("20000 characters cannot fit"),
        pb.GenerateRequest(text="x" * 20000),
        {"prompt": "x" * 20000},
        param="prompt",
        code=OVERFLOW,
    ),
    Row(
        "prompt and max_tokens too long together",
        "max_tokens must be between 1 and 510 for a prompt of 2 tokens, not 511: this model's maximum context length "
        "is 512 tokens",
        sampled(max_tokens=511),
        {"prompt": "hi", "max_tokens": 511},
        param="max_tokens",
        code=OVERFLOW,
    ),
    Row(
        "token id outside the vocabulary",
        "token id 300 is outside the vocabulary of 300",
        ids(5, 300),
        {"prompt": [5, 300]},
        param="prompt",
    ),
    http_only(
        "negative token id", "prompt.1: Input should be greater than or equal to 0", {"prompt": [5, -1]}, "prompt"
    ),
    http_only("prompt of mixed types", "prompt.1: Input should be a valid integer", {"prompt": [5, "x"]}, "prompt"),
    http_only(
        "prompt of another type",
        "prompt: Input should be a string, a list of strings, token ids, or a list of lists of token ids",
        {"prompt": 5},
        "prompt",
    ),
    Row(
        "unknown model",
        "model 'gpt-9' is not served here; 'tiny-llama' is",
        pb.GenerateRequest(text="hi", model="gpt-9"),
        {"prompt": "hi", "model": "gpt-9"},
        status=404,
        code="model_not_found",
        param="model",
    ),
    Row(
        "cache_namespace too long",
        "cache_namespace must have at most 256 characters, not 257",
        pb.GenerateRequest(text="hi", cache_namespace="n" * 257),
        {"prompt": "hi", "cache_namespace": "n" * 257},
        param="cache_namespace",
    ),
    Row(
        "session_id too long",
        "session_id must have at most 256 characters, not 257",
        pb.GenerateRequest(text="hi", session_id="s" * 257),
        {"prompt": "hi", "session_id": "s" * 257},
        param="session_id",
    ),
    Row(
        "request_id too long",
        "request_id must have at most 256 characters, not 257",
        pb.GenerateRequest(text="hi", request_id="r" * 257),
    ),
]

SAMPLING = [
    Row(
        "max_tokens of 0",
        "max_tokens must be between 1 and 510 for a prompt of 2 tokens, not 0",
        sampled(max_tokens=0),
        {"prompt": "hi", "max_tokens": 0},
        param="max_tokens",
    ),
    both(
        "temperature below 0",
        -0.5,
        "temperature must be a number of at least 0, not -0.5",
        "temperature: Input should be greater than or equal to 0",
    ),
    http_only(
        "temperature above 2",
        "temperature: Input should be less than or equal to 2",
        {"temperature": 2.5},
        "temperature",
    ),
    raw_number("NaN", "NaN", math.nan),
    raw_number("infinity", "Infinity", math.inf),
    raw_number("minus infinity", "-Infinity", -math.inf),
    http_only(
        "number above all floats",
        "temperature: Input should be a finite number",
        b'{"prompt": "hi", "temperature": 1e400}',
        "temperature",
    ),
    http_only(
        "integer of more than 256 digits",
        "the body holds a number with too many digits",
        b'{"prompt": "hi", "seed": 1%s}' % (b"0" * 5000),
    ),
    both(
        "top_p above 1", 1.5, "top_p must be between 0 and 1, not 1.5", "top_p: Input should be less than or equal to 1"
    ),
    both(
        "top_k below -1",
        -2,
        "top_k must be between -1 and 2.14748e+09, not -2",
        "top_k: Input should be greater than or equal to -1",
    ),
    both(
        "min_p below 0",
        -0.25,
        "min_p must be between 0 and 1, not -0.25",
        "min_p: Input should be greater than or equal to 0",
    ),
    both(
        "repetition_penalty of 0",
        0,
        "repetition_penalty must be between 0.01 and 100, not 0",
        "repetition_penalty: Input should be greater than or equal to 0.01",
    ),
    both(
        "presence_penalty above 2",
        3,
        "presence_penalty must be between -2 and 2, not 3",
        "presence_penalty: Input should be less than or equal to 2",
    ),
    both(
        "frequency_penalty below -2",
        -3,
        "frequency_penalty must be between -2 and 2, not -3",
        "frequency_penalty: Input should be greater than or equal to -2",
    ),
    both(
        "logit_bias above 100",
        {7: 101},
        "logit_bias of token 7 must be between -100 and 100, not 101",
        "logit_bias: biases must be between -100 and 100, not 101 of token 7",
    ),
    both(
        "logit_bias outside the vocabulary",
        {300: 1, 7: 1, 302: 1},
        "logit_bias: token ids 300, 302 are outside the vocabulary of 300",
        "",
    ),
    both(
        "logit_bias of 301 tokens",
        dict.fromkeys(range(301), 1),
        "logit_bias may name at most 300 tokens, not 301",
        "logit_bias: Dictionary should have at most 300 items after validation, not more",
    ),
    both(
        "logit_bias of 100,000 tokens",
        dict.fromkeys(range(100_000), 1),
        "sampling has more than 131072 bytes: logit_bias may name 300 tokens and stop_token_ids 300",
        "logit_bias: at most 300 items are taken",
    ),
    http_only(
        "logit_bias with a key that is not a number",
        "logit_bias: keys must be token ids, not 'x'",
        {"logit_bias": {"x": 1}},
        "logit_bias",
    ),
    http_only(
        "logit_bias with leading zeros",
        "logit_bias: keys must be token ids, not '007', '08'",
        {"logit_bias": {"7": 1, "007": 2, "08": 1}},
        "logit_bias",
    ),
    both(
        "logprobs above 20",
        21,
        "num_logprobs must be between 0 and 20, not 21",
        "logprobs: Input should be less than or equal to 20",
    ),
    Row(
        "min_tokens above max_tokens",
        "min_tokens must be at most max_tokens, 3, not 4",
        sampled(min_tokens=4, max_tokens=3),
        {"prompt": "hi", "min_tokens": 4, "max_tokens": 3},
        param="min_tokens",
    ),
    both(
        "prompt_logprobs above 20",
        21,
        "prompt_logprobs must be between -1 and 20, not 21",
        "prompt_logprobs: Input should be less than or equal to 20",
    ),
    http_only(
        "prompt_logprobs in a stream",
        "a stream has no prompt_logprobs: leave out one of them",
        {"prompt_logprobs": 1, "stream": True},
        "prompt_logprobs",
    ),
    http_only(
        "prompt log probabilities in a stream of several outputs",
        "a stream of several outputs has no log probabilities of the prompt",
        {"echo": True, "logprobs": 1, "stream": True, "n": 2},
        "n",
    ),
    http_only(
        "too many prompt log probabilities",
        "63488 prompt tokens in the answer with 4 of the most likely ones each are 317440 log probabilities; one "
        "request may ask for 262144 of its prompts",
        {"prompt": [[1] * 496] * 128, "prompt_logprobs": 4},
        "prompt_logprobs",
    ),
    http_only("seed beyond 64 bits", "seed: Input should be less than 18446744073709551616", {"seed": 2**64}, "seed"),
    http_only("n of 0", "n: Input should be greater than or equal to 1", {"n": 0}, "n"),
    http_only("n above 128", "n: Input should be less than or equal to 128", {"n": 129}, "n"),
    http_only(
        "more than 128 outputs over several prompts",
        "at most 128 outputs for one request, not 130",
        {"prompt": ["a", "b"], "n": 65},
        "n",
    ),
    both(
        "allowed_token_ids outside the vocabulary",
        [7, 300],
        "allowed_token_ids: token id 300 is outside the vocabulary of 300",
        "",
    ),
    both(
        "allowed_token_ids of 16,385 tokens",
        [1] * 16_385,
        "allowed_token_ids may name at most 16384 tokens, not 16385",
        "allowed_token_ids: List should have at most 16384 items after validation, not 16385",
    ),
    Row(
        "allowed_token_ids with structured output",
        "allowed_token_ids cannot be had with structured output",
        pb.GenerateRequest(
            text="hi",
            structured_output=pb.StructuredOutput(regex="a"),
            sampling=pb.SamplingParams(allowed_token_ids=[7]),
        ),
        {"prompt": "hi", "guided_regex": "a", "allowed_token_ids": [7]},
        param="allowed_token_ids",
    ),
    both("logprob_token_ids without logprobs", [7], "logprob_token_ids needs logprobs", ""),
    http_only(
        "prompt truncated to nothing",
        "truncate_prompt_tokens must be -1 or between 1 and 511, not 0",
        {"truncate_prompt_tokens": 0},
        "truncate_prompt_tokens",
    ),
    http_only(
        "suffix, without tokens for it",
        "this model has no tokens for filling in the middle of a text",
        {"suffix": "x"},
        "suffix",
    ),
    http_only(
        "cache_salt with a slash",
        "cache_salt: 1 to 128 characters are taken, without '@', '/', '\\' and NUL",
        {"cache_salt": "a/b"},
        "cache_salt",
    ),
    both("stop of 17 strings", ["x"] * 17, "stop must be at most 16 strings, not 17", ""),
    both("stop with an empty string", ["x", ""], "stop strings must have 1 to 1024 characters, not 0", ""),
    both("stop with a too long string", ["x" * 1025], "stop strings must have 1 to 1024 characters, not 1025", ""),
    both(
        "stop_token_ids outside the vocabulary",
        [300],
        "stop_token_ids: token id 300 is outside the vocabulary of 300",
        "",
    ),
    both(
        "stop_token_ids of 301 tokens",
        [1] * 301,
        "stop_token_ids may name at most 300 tokens, not 301",
        "stop_token_ids: List should have at most 300 items after validation, not 301",
    ),
    both(
        "stop_token_ids of a million tokens",
        [1] * 1_000_000,
        "sampling has more than 131072 bytes: logit_bias may name 300 tokens and stop_token_ids 300",
        "stop_token_ids: at most 300 items are taken",
    ),
    http_only("value of another type", "top_p: Input should be a valid number", {"top_p": "1"}, "top_p"),
    http_only("number for a Boolean", "echo: Input should be a valid boolean", {"echo": 0}, "echo"),
    http_only(
        "feature of other servers",
        "use_beam_search: beam search is not supported by this server",
        {"use_beam_search": True},
        "use_beam_search",
    ),
    http_only(
        "field with another name here",
        "max_new_tokens: this field is called max_tokens here",
        {"max_new_tokens": 5},
        "max_new_tokens",
    ),
    http_only(
        "image in a message",
        "messages.0.content.0.type: images are not supported by this server",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        "messages",
        path=CHATS,
    ),
    http_only(
        "message without content",
        "messages.0.content: a message of role user needs one",
        {"messages": [{"role": "user"}]},
        "messages",
        path=CHATS,
    ),
    http_only(
        "two names for one field",
        "cache_salt: it is another name of cache_namespace: send one of them",
        {"cache_salt": "a", "cache_namespace": "b"},
        "cache_salt",
    ),
    Row(
        "invalid JSON schema",
        "Invalid type: strin",
        pb.GenerateRequest(text="hi", structured_output=pb.StructuredOutput(json_schema='{"type": "strin"}')),
        {"prompt": "hi", "guided_json": {"type": "strin"}},
        param="guided_json",
    ),
    Row(
        "schema that is not JSON",
        "the schema is not JSON: Expecting value: line 1 column 1 (char 0)",
        pb.GenerateRequest(text="hi", structured_output=pb.StructuredOutput(json_schema="yes")),
        {"prompt": "hi", "guided_json": "yes"},
        param="guided_json",
    ),
    Row(
        "structured output without choices",
        "structured_output.choices needs at least one choice, and none may be empty",
        pb.GenerateRequest(text="hi", structured_output=pb.StructuredOutput(choices=pb.Choices())),
        {"prompt": "hi", "guided_choice": []},
        http_message="guided_choice needs at least one choice, and none may be empty",
        param="guided_choice",
    ),
    Row(
        "schema of 100,000 bytes",
        "structured_output has 100004 bytes: at most 65536 bytes are taken",
        pb.GenerateRequest(text="hi", structured_output=pb.StructuredOutput(regex="a" * 100_000)),
        {"prompt": "hi", "guided_regex": "a" * 100_000},
        http_message="at most 65536 bytes are taken",
        param="guided_regex",
    ),
    Row(
        "structured output with ignore_eos",
        "ignore_eos cannot be had with structured output, which ends when it is whole",
        pb.GenerateRequest(
            text="hi",
            structured_output=pb.StructuredOutput(regex="a"),
            sampling=pb.SamplingParams(ignore_eos=True),
        ),
        {"prompt": "hi", "guided_regex": "a", "ignore_eos": True},
        param="ignore_eos",
    ),
    http_only(
        "structured output of two kinds",
        "an output keeps to one thing, not to guided_regex and guided_choice",
        {"prompt": "hi", "guided_regex": "a", "guided_choice": ["a"]},
        "guided_choice",
    ),
    http_only(
        "functions",
        "functions: the API of before tools is not supported by this server: use tools, tool_choice, tool_calls",
        {**CHAT, "functions": [{"name": "f"}]},
        "functions",
        path=CHATS,
    ),
    *(
        http_only(name, message, {**CHAT, **fields}, message.partition(":")[0] if param is None else param, path=CHATS)
        for name, message, fields, param in (
            (
                "more than 128 tools",
                "tools: List should have at most 128 items after validation, not 129",
                {"tools": [TOOL] * 129},
                None,
            ),
            ("duplicate tool", "tools: the function 'f' is there twice", {"tools": [TOOL] * 2}, None),
            (
                "tool of another type",
                "tools.0.type: Input should be 'function'",
                {"tools": [{**TOOL, "type": "custom"}]},
                "tools",
            ),
            (
                "invalid tool name",
                "tools.0.function.name: String should match pattern '^[A-Za-z0-9_-]{1,64}$'",
                {"tools": [{"type": "function", "function": {"name": "a b"}}]},
                "tools",
            ),
            (
                "tools of 300,000 characters",
                "tools: at most 262144 characters are taken",
                {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 300_000}}]},
                None,
            ),
            (
                "tool with a deeply nested schema",
                "tools.0.function.parameters: nested more than 32 deep",
                {"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(100)}}]},
                "tools",
            ),
            (
                "tool_choice of an unknown function",
                "there is no tool 'g' among the tools",
                {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
                "tool_choice",
            ),
            (
                "tool_choice without tools",
                "tool_choice asks for a call, and there are no tools",
                {"tool_choice": "required"},
                "tool_choice",
            ),
            (
                "tool_choice of allowed tools",
                "tool_choice: allowed_tools is not supported by this server: send those that are allowed as tools",
                {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
                None,
            ),
            (
                "required call with an unsupported schema",
                'the parameters of f: Unimplemented keys: ["not"]',
                {
                    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                    "tool_choice": "required",
                },
                "tools",
            ),
            (
                "tool message without call id",
                "messages.0.tool_call_id: a message of role tool needs the id of the call that it answers",
                {"messages": [{"role": "tool", "content": "x"}]},
                "messages",
            ),
            (
                "user message with calls",
                "messages.0.tool_calls: a message of role user has none",
                {"messages": [{**CHAT["messages"][0], "tool_calls": [CALL]}]},
                "messages",
            ),
            (
                "past call with 100,000 items",
                "the arguments of past calls: the body has more than 49152 items; one request may not have so many",
                {
                    "messages": [
                        {
                            "role": "assistant",
                            "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[" + "1," * 100_000}}],
                        }
                    ]
                },
                "messages",
            ),
            (
                "reserved template variable",
                "chat_template_kwargs: messages cannot be set here",
                {"chat_template_kwargs": {"messages": []}},
                None,
            ),
            (
                "template variables of 20,000 characters",
                "chat_template_kwargs: at most 16384 characters are taken",
                {"chat_template_kwargs": {"x": "x" * 20_000}},
                None,
            ),
            (
                "continued message and generation prompt",
                "continue_final_message and add_generation_prompt exclude each other: send one of them",
                {"continue_final_message": True, "add_generation_prompt": True},
                "continue_final_message",
            ),
        )
    ),
]

OTHER_PATHS = [
    Row("nothing to tokenize", "one of prompt and messages is needed", http={}, param="prompt", path=TOKENIZE),
    Row(
        "text to tokenize too long",
        too_long("600 tokens > 511 maximum"),
        http={"prompt": "x" * 600},
        param="prompt",
        code=OVERFLOW,
        path=TOKENIZE,
    ),
    Row(
        "token ids to detokenize outside the vocabulary",
        "token id 300 is outside the vocabulary of 300",
        http={"tokens": [1, 300]},
        param="tokens",
        path=DETOKENIZE,
    ),
    Row(
        "text and token ids, SGLang",
        "one of text and input_ids is needed",
        http={"text": "hi", "input_ids": [1]},
        param="text",
        path=SGLANG,
    ),
    Row(
        "log probabilities, SGLang",
        "return_logprob: log probabilities are not served here: /v1/completions has logprobs",
        http={"text": "hi", "return_logprob": True},
        param="return_logprob",
        path=SGLANG,
    ),
]


def embedding(name: str, message: str, http: dict[str, Any] | None, param: str, **more: Any) -> Row:
    """Args: http: fields besides the input; None: inexpressible."""
    body = None if http is None else {"input": "hi", **http}
    return Row(name, message, http=body, param=param, path=EMBEDDINGS, **more)


def embed(*inputs: str | list[int], **fields: Any) -> pb.EmbedRequest:
    given = [
        pb.EmbedInput(text=one) if isinstance(one, str) else pb.EmbedInput(token_ids=pb.TokenIds(ids=one))
        for one in inputs
    ]
    return pb.EmbedRequest(inputs=given, **fields)


INPUT_TOO_LONG = (
    "the input has 600 tokens, but the model's maximum context length is 512 tokens: shorten it, or set "
    "truncate_prompt_tokens"
)
UNCUT = (
    "this model's embeddings are not made to be cut to 8 dimensions: leave out dimensions, or serve a model with "
    "is_matryoshka or matryoshka_dimensions in its config.json"
)
CUT_OUT_OF_RANGE = "at least 1 and at most 512 tokens can be kept, not {}; -1 keeps as many as the model takes"
UNCHANGED = "inputs are embedded as they are: put the instruction into input"

INPUTS = [
    embedding(
        "nothing to embed",
        "there is no input to embed",
        {"input": []},
        "input",
        grpc=embed(),
        http_message="an input is empty",
    ),
    embedding("empty text to embed", "an input is empty", {"input": ["hi", ""]}, "input", grpc=embed("hi", "")),
    embedding("empty list to embed", "an input is empty", {"input": [[1], []]}, "input", grpc=embed([1], [])),
    embedding(
        "neither text nor token ids to embed",
        "an input is needed: text or token_ids",
        {"input": {"text": "hi"}},
        "input",
        grpc=pb.EmbedRequest(inputs=[pb.EmbedInput()]),
        http_message="input: Input should be a string, a list of strings, token ids, or a list of lists of token ids",
    ),
    embedding(
        "text to embed too long",
        INPUT_TOO_LONG,
        {"input": "x" * 600},
        "input",
        grpc=embed("x" * 600),
        code="context_length_exceeded",
    ),
    embedding(
        "too many token ids to embed",
        INPUT_TOO_LONG,
        {"input": [1] * 600},
        "input",
        grpc=embed([1] * 600),
        code="context_length_exceeded",
    ),
    embedding(
        "token id to embed outside the vocabulary",
        "token id 300 is outside the vocabulary of 300",
        {"input": [1, 300]},
        "input",
        grpc=embed([1, 300]),
    ),
    embedding(
        "more than 2048 inputs",
        "2049 inputs; one request may have 2048",
        {"input": ["hi"] * 2049},
        "input",
        grpc=embed(*["hi"] * 2049),
        http_message="input: List should have at most 2048 items after validation, not 2049",
    ),
    embedding(
        "100,000 inputs",
        "the request has more than 2048 inputs",
        None,
        "input",
        grpc=embed(*["hi"] * 100_000),
    ),
    embedding(
        "more tokens than one request may embed",
        "more than 262144 tokens of input; one request may have 262144",
        {"input": [[1] * 512] * 513},
        "input",
        grpc=embed(*[[1] * 512] * 513),
    ),
    embedding(
        "dimensions of a model that has but one size",
        UNCUT,
        {"dimensions": 8},
        "dimensions",
        grpc=embed("hi", dimensions=8),
    ),
    embedding(
        "no dimensions",
        "dimensions must be at least 1; leave it out for all",
        {"dimensions": 0},
        "dimensions",
        grpc=embed("hi", dimensions=0),
        http_message="dimensions: Input should be greater than or equal to 1",
    ),
    embedding(
        "truncation to nothing",
        CUT_OUT_OF_RANGE.format(0),
        {"truncate_prompt_tokens": 0},
        "truncate_prompt_tokens",
        grpc=embed("hi", truncate_prompt_tokens=0),
    ),
    embedding(
        "truncation to more than fits",
        CUT_OUT_OF_RANGE.format(513),
        {"truncate_prompt_tokens": 513},
        "truncate_prompt_tokens",
        grpc=embed("hi", truncate_prompt_tokens=513),
    ),
    embedding(
        "embedding encoded otherwise",
        "encoding_format: Input should be 'float' or 'base64'",
        {"encoding_format": "bytes"},
        "encoding_format",
    ),
    embedding(
        "embedding of another type", "embed_dtype: embeddings are float32", {"embed_dtype": "float16"}, "embed_dtype"
    ),
    embedding(
        "conversation to embed",
        "messages: conversations are not embedded: send their text as input",
        CHAT,
        "messages",
    ),
    embedding("kind of an input to embed", f"input_type: {UNCHANGED}", {"input_type": "query"}, "input_type"),
    embedding(
        "normalize by two names",
        "use_activation: it is another name of normalize: send one of them",
        {"normalize": True, "use_activation": True},
        "use_activation",
    ),
]

WIRE = [
    Row("invalid protobuf message", MALFORMED, b"\xff" * 16),
    Row("truncated protobuf message", MALFORMED, ids(*range(50)).SerializeToString()[:-5]),
    Row(
        "100,000 lists and objects",
        "the body has more than 16384 lists and objects; one request may not have so many",
        None,
        b'{"prompt": ' + b"[" * 50 + b"[{}]," * 50_000,
    ),
    Row(
        "field repeated 100,000 times",
        "the request has more than 64 fields",
        b"\x1a\0" * 100_000,
    ),
    Row(
        "invalid UTF-8",
        MALFORMED,
        b"\x1a\x02\xff\xfe",
        b'{"prompt": "\xff\xfe"}',
        "the body is not valid UTF-8 at byte 12",
    ),
    surrogate("prompt", prompt="a\ud800"),
    surrogate("model", model="\udfff"),
    surrogate("cache_namespace", cache_namespace="\ud800\ud800"),
    surrogate("session_id", session_id="a\udfff"),
    surrogate("stop", stop=["\udc00\ud800"]),
    surrogate("messages", CHATS, messages=[{"role": "user", "content": "\ud83d"}]),
    surrogate("a field's name", COMPLETIONS, **{"\ud800": 1}),
    surrogate("a field without effect", user="\udbff"),
    http_only(
        "NaN in a field without effect",
        "the body is not valid JSON: NaN is no number there",
        b'{"prompt": "hi", "metadata": {"x": NaN}}',
    ),
    http_only(
        "malformed JSON",
        "the body is not valid JSON at character 16: Expecting ',' delimiter",
        b'{"prompt": "hi" "n": 1}',
    ),
    http_only(
        "truncated JSON", "the body is not valid JSON at character 15: Expecting ',' delimiter", b'{"prompt": "hi"'
    ),
    http_only(
        "deeply nested JSON", "the body is nested too deeply", b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    ),
    http_only("JSON without an object", NOT_AN_OBJECT, b'["hi"]'),
    http_only("no body", NOT_AN_OBJECT, b""),
    http_only("wrong content type", NOT_AN_OBJECT, {}, content_type="text/plain"),
    Row(
        "message of 50 MB",
        f"SERVER: Received message larger than max ({NUM_LARGE_BYTES + 5} vs. {MAX_BODY_BYTES})",
        pb.GenerateRequest(text="x" * NUM_LARGE_BYTES),
        grpc_code="RESOURCE_EXHAUSTED",
    ),
]


def response(name: str, message: str, fields: dict[str, Any], param: str, **more: Any) -> Row:
    return Row(name, message, http={"input": "hi", **fields}, param=param, path=RESPONSES, **more)


def anthropic(name: str, message: str, fields: dict[str, Any], **more: Any) -> Row:
    """Build a row for /v1/messages, where errors name the field only in the message."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **fields}
    return Row(name, message, http=body, path=MESSAGES, **more)


OTHER_APIS = [
    response(
        "response with a limit too large",
        "max_output_tokens must be between 1 and 493 for a prompt of 19 tokens, not 600: this model's maximum context "
        "length is 512 tokens",
        {"max_output_tokens": 600},
        "max_output_tokens",
        code=OVERFLOW,
    ),
    response("response without input", "input: Input should be a string or a list of items", {"input": None}, "input"),
    response(
        "response to an item reference",
        "input.0: item_reference is not supported by this server: send the item itself",
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        "input",
    ),
    response(
        "response to an unsupported item",
        "input.0: items of type 'web_search_call' are not supported by this server",
        {"input": [{"type": "web_search_call", "id": "ws_1"}]},
        "input",
    ),
    response(
        "response with a built-in tool",
        "tools.0: web_search is not supported by this server: tools are functions",
        {"tools": [{"type": "web_search"}]},
        "tools",
    ),
    response(
        "response continuing an unknown one",
        "no response 'resp_1' is kept: send the whole conversation as input",
        {"previous_response_id": "resp_1"},
        "previous_response_id",
        status=404,
        code="previous_response_not_found",
    ),
    response(
        "response in the background, not stored",
        "background: a response in the background is stored: leave out store",
        {"background": True, "store": False},
        "background",
    ),
    response(
        "response in a conversation and after a response",
        "conversation: a response continues a conversation or a response: send one of them",
        {"conversation": "conv_1", "previous_response_id": "resp_1"},
        "conversation",
    ),
    response(
        "response in an unknown conversation",
        "no conversation 'conv_1' is kept",
        {"conversation": "conv_1"},
        "conversation",
        status=404,
        code="conversation_not_found",
    ),
    anthropic(
        "message of a thread",
        "thread: conversations are not kept by this API: send all messages, or use /v1/responses",
        {"thread": {"type": "continue", "previous_message_id": "msg_1"}},
    ),
    anthropic("message without a limit", "max_tokens: Input should be a valid integer", {"max_tokens": None}),
    anthropic(
        "message with an image",
        "messages.0.content.0: images are not supported by this server",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
    ),
    anthropic(
        "message with a misplaced block",
        "messages: a message of role user has no blocks of type thinking",
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "Hm."}]}]},
    ),
    anthropic(
        "message with a built-in tool",
        "tools.0: bash_20250124 is not supported by this server: tools are the client's own",
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
    ),
    anthropic(
        "message for another model",
        "model 'gpt-9' is not served here; 'tiny-llama' is",
        {"model": "gpt-9"},
        status=404,
    ),
]

ROWS = [*PROMPTS, *SAMPLING, *OTHER_PATHS, *INPUTS, *WIRE, *OTHER_APIS]

# Rows that need several requests or another cluster.
LARGE_BODY = f"the body has more than {MAX_BODY_BYTES} bytes"
SHOWN_APART = {
    row.name: row
    for row in (
        Row("body of 50 MB, announced", LARGE_BODY, http=b"", status=413),
        Row("body of 50 MB, in chunks", LARGE_BODY, http=b"", status=413),
        Row("body that stops coming", "no part of the body came for 30 s", http=b"", status=408),
        Row("head of more than 64 KiB", "the request's head has more than 65536 bytes", http=b"", status=431),
        *(
            Row(name, message, http=b"", status=status)
            for name, status, message in (
                ("more than 128 headers", 431, "the request has more than 128 headers"),
                ("URL of more than 8 KiB", 414, "the URL has more than 8192 bytes"),
                ("trailers", 400, "trailers are not taken here: send the body without them"),
                (
                    "endless trailer, or chunk extension",
                    400,
                    "the request has too many bytes beside its body: send larger chunks, and nothing after the body",
                ),
                (
                    "body in tiny chunks",
                    400,
                    "the body comes in chunks of less than 64 bytes: send larger ones",
                ),
                ("body in gzip", 415, "bodies encoded as gzip are not taken: send it without that encoding"),
                ("tunnel through the server", 405, "this server is no proxy: CONNECT is not taken"),
                ("bytes that are no HTTP", 400, "these bytes are no HTTP request"),
            )
        ),
        Row("unknown path", "there is no /v1/audio/speech here", http={}, status=404, path="/v1/audio/speech"),
        Row("wrong method", "/v1/models does not take POST", http={}, status=405, path="/v1/models"),
        Row("unknown method", "Method not found!", b"", grpc_code="UNIMPLEMENTED"),
        Row(
            "no API key",
            "an API key is needed: send it as 'Authorization: Bearer KEY'",
            b"",
            {},
            grpc_code="UNAUTHENTICATED",
            status=401,
            code="invalid_api_key",
        ),
        Row(
            "wrong API key",
            "the API key is wrong",
            b"",
            {},
            grpc_code="UNAUTHENTICATED",
            status=401,
            code="invalid_api_key",
        ),
        Row(
            "too many requests of one key",
            "2 requests of this key are in hand already; try again when one has ended",
            b"",
            {},
            grpc_code="RESOURCE_EXHAUSTED",
            status=429,
            code="overloaded",
        ),
        Row("made-up resume token", "the resume token is malformed: send it as the router gave it", b""),
        Row("resume token of another cluster", "the resume token is from another cluster", b""),
        Row("resume token of another key", "the resume token belongs to another API key", b""),
        Row(
            "resume token of another request",
            "the resume token belongs to another request: send the same prompt, sampling, structured_output, priority, "
            "cache_namespace, session_id and model",
            b"",
        ),
        Row(
            "made-up output to resume",
            "the proof is not of these tokens: send the last resume_token and resume_proof of the stream, and all "
            "tokens so far",
            b"",
        ),
        Row("malformed event id", "Last-Event-ID is not an event id of this server", http={}, param="Last-Event-ID"),
        Row(
            "event id of another stream or key",
            "nothing is known of this stream: begin again, without the header",
            http={},
            status=404,
            code="stream_not_found",
            param="Last-Event-ID",
        ),
        Row(
            "event id of another body",
            "the stream belongs to another request: send the same body again",
            http={},
            param="Last-Event-ID",
        ),
        Row(
            "no worker",
            "no prefill and no decode worker is connected; nobody came within 2 s",
            b"",
            {},
            grpc_code="UNAVAILABLE",
            status=503,
            code="unavailable",
        ),
    )
}
