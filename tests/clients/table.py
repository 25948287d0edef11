"""Tested clients and their versions."""

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True, slots=True)
class Client:
    """
    Attributes:
        script: file in `scripts` to run in the client's environment.
        is_tuned_for: True if the server was written with this client in mind. The others came later, to find gaps.
    """

    name: str
    requirements: tuple[str, ...]
    script: str
    is_tuned_for: bool = True


CLIENTS = (
    Client("openai", ("openai==3.54.0",), "openai_fields.py"),
    Client("openai-responses", ("openai==3.54.0",), "openai_responses.py"),
    Client("guidellm", ("guidellm==0.8.1",), "guidellm_defaults.py"),
    Client("aiperf", ("aiperf==0.13.0",), "aiperf_defaults.py"),
    Client("litellm", ("litellm==1.106.2",), "litellm_turns.py"),
    Client("lm-eval", ("lm-eval[api]==0.4.13", "transformers==5.23.0"), "lm_eval_scores.py"),
    Client("pydantic-ai", ("pydantic-ai-slim[openai]==2.68.0",), "pydantic_ai_agent.py"),
    Client("instructor", ("instructor==1.17.0",), "instructor_models.py", is_tuned_for=False),
    Client("langchain", ("langchain-openai==1.7.3",), "langchain_chains.py", is_tuned_for=False),
    Client("inspect", ("inspect-ai==0.3.285", "openai==3.54.0"), "inspect_eval.py", is_tuned_for=False),
    Client("openai-agents", ("openai-agents==0.24.0",), "agents_runs.py", is_tuned_for=False),
    Client("anthropic", ("anthropic==2.14.0",), "anthropic_messages.py"),
)
