"""Objects of a class from text, in each mode for OpenAI-compatible servers."""

import instructor
import openai
from pydantic import BaseModel, Field
from report import Report

report = Report()


class City(BaseModel):
    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=10**8)


def extract(mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{report.url}/v1", api_key="none"), mode=mode)
    city = client.chat.completions.create(
        model=report.model,
        response_model=City,
        messages=[{"role": "user", "content": "Paris has 2000000 people."}],
        **{"max_output_tokens" if mode is instructor.Mode.RESPONSES_TOOLS else "max_tokens": 300},
        temperature=0,
        max_retries=0,
    )
    assert isinstance(city, City)


def partial() -> None:
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{report.url}/v1", api_key="none"), mode=instructor.Mode.JSON_SCHEMA
    )
    cities = list(
        client.chat.completions.create_partial(
            model=report.model,
            response_model=City,
            messages=[{"role": "user", "content": "Paris has 2000000 people."}],
            max_tokens=300,
        )
    )
    assert cities[-1].name is not None


for mode in (
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON_SCHEMA,
    # A forced call with a format.
    instructor.Mode.RESPONSES_TOOLS,
):
    report.check(f"a class, mode {mode.name}", lambda mode=mode: extract(mode))
report.check("a class, in parts", partial)
report.end()
