"""OpenAI agents over responses (their default) and over chat completions."""

import asyncio

import agents
import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from report import Report

report = Report()
agents.set_tracing_disabled(True)
MODELS = {"responses": OpenAIResponsesModel, "chat completions": OpenAIChatCompletionsModel}


@function_tool
def population(city: str) -> int:
    """The number of people in a city."""
    return len(city)


def make(kind: type, **settings: object) -> dict:
    """Each run needs its own model, because it has its own event loop."""
    client = openai.AsyncOpenAI(base_url=f"{report.url}/v1", api_key="none", max_retries=0)
    return {"model": kind(report.model, client), "model_settings": ModelSettings(**settings)}


# A length-limited response is an error to these agents.
WHOLE = {"max_tokens": 400, "temperature": 0}


def text(kind: type) -> None:
    agent = Agent("helper", instructions="Be brief.", **make(kind, **WHOLE))
    first = Runner.run_sync(agent, "What is the capital of France?")
    agent = Agent("helper", instructions="Be brief.", **make(kind, **WHOLE))
    again = Runner.run_sync(agent, [*first.to_input_list(), {"role": "user", "content": "And of Italy?"}])
    assert again.final_output


def tool(kind: type) -> None:
    asked = make(kind, max_tokens=200, tool_choice="required", temperature=0)
    agent = Agent("helper", tools=[population], **asked)
    found = Runner.run_sync(agent, "How many people live in Paris?", max_turns=4)
    assert any(item.type == "tool_call_output_item" for item in found.new_items)


def streamed(kind: type) -> None:
    async def run() -> str:
        agent = Agent("helper", **make(kind, **WHOLE))
        running = Runner.run_streamed(agent, "Say hello.")
        async for _ in running.stream_events():
            pass
        return str(running.final_output)

    assert asyncio.run(run())


for name, kind in MODELS.items():
    report.check(f"two turns, {name}", lambda kind=kind: text(kind))
    report.check(f"a tool, {name}", lambda kind=kind: tool(kind))
    report.check(f"streamed, {name}", lambda kind=kind: streamed(kind))
report.end()
