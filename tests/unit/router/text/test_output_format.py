import pytest

from tandem.router.text.output_format import OutputFormat
from tandem.router.text.reasoning import Beginning
from tests.fakes import chat_templates
from tests.fakes.chat_templates import tokenizer

AUTO = {
    chat_templates.QWEN25: ("hermes", False),
    chat_templates.QWEN3: ("hermes", True),
    chat_templates.LLAMA31: ("llama3_json", False),
    chat_templates.MISTRAL: ("mistral", False),
    chat_templates.DEEPSEEK_R1: ("hermes", True),
    chat_templates.SMOLLM2: ("hermes", False),
}


@pytest.mark.parametrize("template", AUTO, ids=lambda template: template[:20])
def test_parsers_by_template(template: str) -> None:
    found = OutputFormat(tokenizer(template), "auto", "auto")
    assert (found.tool_parser_name, found.reasoning_style is not None) == AUTO[template]


def test_parsers_by_name() -> None:
    found = OutputFormat(tokenizer(chat_templates.QWEN3), "mistral", "none")
    assert (found.tool_parser_name, found.reasoning_style) == ("mistral", None)
    found = OutputFormat(tokenizer(chat_templates.QWEN25), "none", "deepseek_r1")
    assert found.tool_parser_name == "none" and found.reasoning_style is not None


def test_custom_parser_is_loaded_at_start() -> None:
    OutputFormat(tokenizer(chat_templates.QWEN25), "tandem.router.text.tool_parsers.hermes:HermesParser", "none").find()
    with pytest.raises(ValueError, match="must be a class that derives from"):
        OutputFormat(tokenizer(chat_templates.QWEN25), "json:JSONDecoder", "none").find()


def test_special_tokens_shown_to_parser() -> None:
    found = OutputFormat(tokenizer(chat_templates.MISTRAL), "auto", "auto")
    assert set(found.marks("mistral", Beginning.ANSWER).values()) == {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}
    assert found.marks("none", Beginning.ANSWER) == {}
    special = tokenizer(chat_templates.QWEN3, ("</think>",))
    assert list(OutputFormat(special, "auto", "auto").marks("none", Beginning.OPEN).values()) == ["</think>"]
