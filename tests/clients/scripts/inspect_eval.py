"""Inspect: a small task with scores, a tool, and log probabilities."""

import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, multiple_choice, system_message, use_tools
from inspect_ai.tool import tool
from report import Report

report = Report()


@tool
def add():
    async def execute(x: int, y: int):
        """
        Adds two numbers.

        Args:
            x: The first.
            y: The second.
        """
        return x + y

    return execute


def run(solver: list, config: GenerateConfig, samples: list[Sample], provider: str = "openai-api/tandem") -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = get_model(f"{provider}/{report.model}", base_url=f"{report.url}/v1", api_key="none", config=config)
        task = Task(dataset=samples, solver=solver, scorer=includes())
        log = eval(task, model=model, log_dir=directory, display="none")[0]
        assert log.status == "success", log.error.message
        assert len(log.samples) == len(samples)


SAMPLES = [Sample("What is the capital of France?", target="Paris"), Sample("Say yes.", target="yes")]
CHOICES = [Sample("What do bees make?", choices=["honey", "milk"], target="A")]
SHORT = {"max_tokens": 32}
report.check("two samples", lambda: run([system_message("Be brief."), generate()], GenerateConfig(**SHORT), SAMPLES))
report.check(
    "log probabilities and a seed",
    lambda: run([generate()], GenerateConfig(**SHORT, logprobs=True, top_logprobs=2, seed=1, temperature=0.5), SAMPLES),
)
report.check("multiple choice", lambda: run([multiple_choice()], GenerateConfig(**SHORT), CHOICES))
report.check(
    "a tool",
    lambda: run([use_tools(add()), generate()], GenerateConfig(**SHORT), [Sample("What is 1 + 1?", target="2")]),
)
report.check(
    "reasoning options",
    lambda: run([generate()], GenerateConfig(**SHORT, reasoning_effort="low", parallel_tool_calls=False), SAMPLES),
)
report.check("as a vLLM server", lambda: run([generate()], GenerateConfig(**SHORT), SAMPLES, "vllm"))
report.end()
