"""Chat, tools and structured output of LangChain's OpenAI package."""

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field
from report import Report

report = Report()
GIVEN = {"model": report.model, "base_url": f"{report.url}/v1", "api_key": "none", "max_retries": 0}
chat = ChatOpenAI(**GIVEN, max_tokens=300, temperature=0)


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=10**8)


@tool
def population(city: str) -> int:
    """The number of people in a city."""
    return len(city)


def turns() -> None:
    first = chat.invoke([SystemMessage("Be brief."), HumanMessage("What is the capital of France?")])
    assert isinstance(first, AIMessage)
    assert chat.invoke([HumanMessage("What is the capital of France?"), first, HumanMessage("And of Italy?")]).content


def streamed() -> None:
    chunks = list(chat.stream("Say hello.", stream_usage=True))
    assert any(chunk.usage_metadata for chunk in chunks)


def structured(method: str) -> None:
    for strict in (None, True):
        assert isinstance(chat.with_structured_output(City, method=method, strict=strict).invoke("Name a city."), City)


def called() -> None:
    bound = chat.bind_tools([population], tool_choice="any")
    question = HumanMessage("How many people live in Paris?")
    answer = bound.invoke([question])
    call = answer.tool_calls[0]
    assert call["name"] == "population"
    result = ToolMessage(str(population.invoke(call["args"])), tool_call_id=call["id"])
    assert chat.bind_tools([population]).invoke([question, answer, result]).response_metadata["finish_reason"]


def called_before_a_format() -> None:
    """A forced call wins over the format, which binds the answer after it."""
    bound = chat.bind_tools([population], tool_choice="any", response_format=City)
    question = HumanMessage("How many people live in Paris?")
    answer = bound.invoke([question])
    assert answer.tool_calls[0]["name"] == "population"
    result = ToolMessage("2000000", tool_call_id=answer.tool_calls[0]["id"])
    bound = chat.bind_tools([population], tool_choice="none", response_format=City)
    assert isinstance(bound.invoke([question, answer, result]).additional_kwargs["parsed"], City)


def too_long() -> None:
    try:
        chat.invoke("word " * 20_000)
    except ContextOverflowError:
        return
    raise AssertionError("the prompt was taken")


def completion() -> None:
    assert OpenAI(**GIVEN, max_tokens=8).invoke("The capital of France is")


def responses() -> None:
    model = ChatOpenAI(**GIVEN, max_tokens=300, use_responses_api=True)
    assert model.invoke("Say hello.").text


report.check("two turns", turns)
report.check("streamed with usage", streamed)
for method in ("json_schema", "function_calling"):
    report.check(f"structured output, {method}", lambda method=method: structured(method))
report.check("a tool's call and its result", called)
report.check("a forced call with a format", called_before_a_format)
report.check("a prompt that is too long is known as that", too_long)
report.check("completion", completion)
report.check("responses", responses)
report.end()
