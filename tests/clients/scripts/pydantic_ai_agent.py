"""Pydantic AI's tools, and structured output in the modes that bind the model."""

import asyncio
import contextlib

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelContextWindowExceededError, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits
from report import Report

report = Report()
provider = OpenAIProvider(base_url=f"{report.url}/v1", api_key="none")
model = OpenAIChatModel(report.model, provider=provider)


class City(BaseModel):
    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=10**8)


def structured(output: object) -> None:
    agent = Agent(model, output_type=output, model_settings={"max_tokens": 300, "temperature": 0}, retries=2)
    assert isinstance(agent.run_sync("Name a city.").output, City)


def tools() -> None:
    agent = Agent(model, output_type=ToolOutput(City), model_settings={"max_tokens": 300, "temperature": 0}, retries=3)
    asked: list[str] = []

    @agent.tool_plain
    def population(city: str) -> int:
        """The number of people in a city."""
        asked.append(city)
        return len(city)

    # A small model does not always reach the final call.
    with contextlib.suppress(UsageLimitExceeded):
        agent.run_sync("How many people live in Paris?", usage_limits=UsageLimits(request_limit=4))
    assert asked


def streamed() -> None:
    async def run() -> City:
        agent = Agent(model, output_type=NativeOutput(City), model_settings={"max_tokens": 300}, retries=2)
        async with agent.run_stream("Name a city.") as result:
            return await result.get_output()

    assert isinstance(asyncio.run(run()), City)


def text() -> None:
    agent = Agent(model, instructions="Be brief.", model_settings={"max_tokens": 16})
    first = agent.run_sync("What is the capital of France?")
    assert agent.run_sync("And of Italy?", message_history=first.all_messages()).output


def too_long() -> None:
    try:
        Agent(model).run_sync("word " * 20_000)
    except ModelContextWindowExceededError:
        return
    raise AssertionError("the prompt was taken")


report.check("two turns of text", text)
report.check("output by JSON schema", lambda: structured(NativeOutput(City)))
report.check("output by a tool", lambda: structured(ToolOutput(City)))
report.check("output by JSON schema, streamed", streamed)
report.check("tools beside the output's", tools)
report.check("a prompt that is too long is known as that", too_long)
report.end()
