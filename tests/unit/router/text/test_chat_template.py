from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tandem.router.text.chat import Chat
from tandem.router.text.tokenizer import Tokenizer
from tests.fakes.tokenizer_files import CHATML, byte_level, save

TALK = [{"role": "user", "content": "1 < 2 & 'é' 😀"}]
TEMPLATES = {
    "chatml": CHATML,
    "whitespace control": "{% for m in messages %}\n  {% if 1 %}\n{{ m.role }}\n{% endif %}\n{% endfor %}",
    "tojson": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}",
    "loop control": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}!{% endfor %}",
    "special tokens": "{{ bos_token }}[{{ eos_token }}]{{ tools }}{{ pad_token is none }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in [1] %}{% set ns.n = 1 %}{% endfor %}{{ ns.n }}",
    "today": "{{ strftime_now('%Y-%m-%d') }}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_templates_render_as_in_transformers(tmp_path: Path, template: str) -> None:
    from transformers import AutoTokenizer

    eos = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "rstrip": False}
    save(tmp_path, byte_level(), eos_token=eos, chat_template=template)
    messages = [*TALK, {"role": "assistant", "content": "two words"}]
    oracle: Any = AutoTokenizer.from_pretrained(tmp_path)
    expected = oracle.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert Tokenizer(tmp_path).encode_chat(messages) == expected


def test_bos_is_written_once(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level(bos=True), chat_template="{{ bos_token }}hi"))
    assert tokenizer.encode("hi")[0] == 256
    assert tokenizer.encode_chat(TALK) == tokenizer.encode("hi")


def test_template_sources(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template=named))
    assert tokenizer.decode(tokenizer.encode_chat(TALK)) == "plain"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat(TALK)) == "from the file"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, r"no chat template: send a plain prompt instead \(/v1/completions, or tandem generate --raw\)$"),
        ([{"name": "rag", "template": "x"}], "has no chat template"),
        ("{% if %}", "template is malformed"),
        ("{{ raise_exception('roles must alternate') }}", "rejects the messages: roles must alternate"),
        ("{{ messages[0].name + 'x' }}", "rejects the messages"),
        ("{{ 1 // 0 }}", "rejects the messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "rejects the messages"),
        ("{{ messages.append(1) }}", "rejects the messages"),
    ],
)
def test_template_refusals(tmp_path: Path, template: Any, message: str) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template=template))
    with pytest.raises(ValueError, match=message):
        tokenizer.encode_chat(TALK)


def test_strftime_now_uses_local_clock(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template="{{ strftime_now('%Y') }}"))
    assert tokenizer.decode(tokenizer.encode_chat(TALK)) == str(datetime.now().year)


def test_operators_template(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), chat_template="the model's")
    (tmp_path / "own.jinja").write_text("own")
    assert Tokenizer(tmp_path, tmp_path / "own.jinja").render_chat(TALK) == "own"
    with pytest.raises(ValueError, match=r"cannot read the chat template .*none.jinja: No such file"):
        Tokenizer(tmp_path, tmp_path / "none.jinja")
    (tmp_path / "bad.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match=r"the chat template .*bad.jinja cannot be used: .*malformed"):
        Tokenizer(tmp_path, tmp_path / "bad.jinja")
    (tmp_path / "bytes.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="cannot be used"):
        Tokenizer(tmp_path, tmp_path / "bytes.jinja")


def test_separate_template_for_tools(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "{{ tools | tojson }}"}, {"name": "default", "template": "plain"}]
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template=named))
    tool = {"type": "function", "function": {"name": "f"}}
    assert tokenizer.render_chat(Chat(TALK, [tool])) == '[{"type": "function", "function": {"name": "f"}}]'
    assert tokenizer.render_chat(Chat(TALK)) == "plain"


def test_continued_last_message(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template=CHATML))
    talk = [*TALK, {"role": "assistant", "content": "well \n"}]
    whole = tokenizer.render_chat(Chat(talk, add_generation_prompt=False))
    assert whole.endswith("well \n</s>\n")
    assert tokenizer.render_chat(Chat(talk, is_continued=True)) == whole.removesuffix("</s>\n")
    assert talk[-1]["content"] == "well \n"
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template="{{ messages[0].content }}"))
    with pytest.raises(ValueError, match="does not show the last message"):
        tokenizer.render_chat(Chat(talk, is_continued=True))


def test_variables_cannot_replace_the_chat(tmp_path: Path) -> None:
    source = "{{ messages[0].role }}{{ bos_token }}{{ own }}{{ documents | tojson }}"
    tokenizer = Tokenizer(save(tmp_path, byte_level(), chat_template=source))
    variables = {"messages": [{"role": "x"}], "bos_token": "x", "own": "!", "documents": "x"}
    assert tokenizer.render_chat(Chat(TALK, variables=variables)) == "user<s>!null"
