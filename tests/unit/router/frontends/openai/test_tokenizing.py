"""POST /tokenize and /detokenize."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from tandem.router.config import RouterConfig
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.openai.app import make_app
from tandem.router.policies.least_loaded import LeastLoaded
from tandem.router.router import Router
from tandem.router.text.tokenizer import Tokenizer
from tests.fakes.http_requests import HttpAnswer, http_request
from tests.fakes.tokenizer_files import byte_level, save

MAX_MODEL_LEN = 4000
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    "{% endfor %}{{ style }}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save(tmp_path_factory.mktemp("model"), byte_level(), {"vocab_size": 300})
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def make(model_dir: Path, **config: Any) -> tuple[Router, ASGIApp]:
    settings = RouterConfig(str(model_dir), "fake", MAX_MODEL_LEN, other_model_names=("alias",), **config)
    router = Router(settings, LeastLoaded())
    return router, make_app(Frontend(router, Tokenizer(model_dir), settings))


def post(model_dir: Path, path: str, **body: Any) -> HttpAnswer:
    async def run() -> HttpAnswer:
        return await http_request(make(model_dir)[1], "POST", path, body)

    return asyncio.run(run())


@pytest.mark.parametrize("text", ["", "héllo <eos>", "x" * 3000])
def test_a_text_becomes_tokens_and_again_a_text(model_dir: Path, text: str) -> None:
    tokenizer = Tokenizer(model_dir)
    answer = post(model_dir, "/tokenize", prompt=text, model="alias").json
    expected = tokenizer.encode(text)
    assert answer == {
        "count": len(expected),
        "max_model_len": MAX_MODEL_LEN,
        "tokens": expected,
        "token_strs": None,
    }
    assert post(model_dir, "/detokenize", tokens=expected).json == {"prompt": text}


def test_a_program_that_tokenizes_here_learns_the_special_tokens_and_the_template(model_dir: Path) -> None:
    answer = asyncio.run(http_request(make(model_dir)[1], "GET", "/tokenizer_info", None)).json
    assert answer["chat_template"] == (model_dir / "chat_template.jinja").read_text()
    assert answer["model_max_length"] == MAX_MODEL_LEN
    # Gives ids by text.
    tokenizer = Tokenizer(model_dir)
    assert tokenizer.encode(answer["eos_token"]) == [tokenizer.eos_token_ids[0]]


def test_tokens_by_their_names(model_dir: Path) -> None:
    answer = post(model_dir, "/tokenize", prompt="a b", return_token_strs=True, add_special_tokens=False).json
    tokenizer = Tokenizer(model_dir)
    assert answer["token_strs"] == [tokenizer.spelling(token_id) for token_id in answer["tokens"]]
    assert "a" in answer["token_strs"][0]


def test_a_conversation_is_what_its_template_makes_of_it(model_dir: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "yo"}]}]
    chat = post(model_dir, "/tokenize", messages=messages).json
    text = post(model_dir, "/tokenize", prompt="<user>hi<assistant>yo<assistant>", add_special_tokens=False).json
    assert chat == text and chat["count"]


def test_a_conversation_has_all_that_a_chat_may_have(model_dir: Path) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    answer = post(
        model_dir,
        "/tokenize",
        messages=messages,
        tools=[{"type": "function", "function": function}],
        chat_template_kwargs={"style": "!"},
        add_generation_prompt=False,
    ).json
    text = post(model_dir, "/detokenize", tokens=answer["tokens"]).json["prompt"]
    tools, _, rest = text.partition("<user>")
    assert json.loads(tools) == [{"type": "function", "function": function}]
    assert rest == 'hi<assistant>f({"a": 1})<tool>2!'


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/tokenize", {}, "prompt", "one of prompt and messages is needed"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": ""}]}, "prompt", "one of prompt and"),
        ("/tokenize", {"prompt": "x " * MAX_MODEL_LEN}, "prompt", "the prompt is too long: "),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "prompt: Input should be a valid string"),
        (
            "/tokenize",
            {
                "messages": [{"role": "user", "content": "a"}],
                "add_generation_prompt": True,
                "continue_final_message": True,
            },
            "continue_final_message",
            "continue_final_message and add_generation_prompt exclude each other",
        ),
        ("/tokenize", {"messages": []}, "messages", "messages: List should have at least 1 item"),
        ("/detokenize", {"tokens": [300]}, "tokens", "token id 300 is outside the vocabulary of 300"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "tokens.0: Input should be greater than or equal to 0"),
        ("/detokenize", {"tokens": [1] * MAX_MODEL_LEN}, "tokens", f"the prompt is too long: {MAX_MODEL_LEN} tokens"),
        ("/detokenize", {}, "tokens", "tokens: Field required"),
    ],
)
def test_what_is_refused(model_dir: Path, path: str, body: dict[str, Any], param: str, message: str) -> None:
    answer = post(model_dir, path, **body)
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, param) and error["message"].startswith(message)
    assert post(model_dir, path, **body, model="other").status in (400, 404)


def test_they_are_let_in_as_other_requests_are(model_dir: Path) -> None:
    async def run() -> None:
        router, app = make(model_dir, api_keys=("key",))
        assert (await http_request(app, "POST", "/tokenize", {"prompt": "a"})).status == 401
        assert (await http_request(app, "POST", "/detokenize", {"tokens": [1]}, "key")).status == 200
        router.drain()
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert (await http_request(app, "POST", path, body, "key")).status == 503

    asyncio.run(run())
