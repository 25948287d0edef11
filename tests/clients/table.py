"""Tested clients, their versions and what to set in them."""

import re
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True, slots=True)
class Client:
    """
    Attributes:
        requirements: packages of its environment; the first is the client's own.
        script: file in `scripts` to run in the client's environment.
        settings: what a user sets, in Markdown.
        is_for_node: True if the packages are npm's, written NAME@VERSION.
        is_tuned_for: True if the server was written with this client in mind. The others came later, to find gaps.
    """

    name: str
    requirements: tuple[str, ...]
    script: str
    settings: str
    is_for_node: bool = False
    is_tuned_for: bool = True

    @property
    def package(self) -> str:
        return re.split(r"==|\[|@", self.requirements[0])[0]


CLIENTS = (
    Client("openai", ("openai==3.54.0",), "openai_fields.py", '`base_url="URL/v1"`, any `api_key`'),
    Client("openai-responses", ("openai==3.54.0",), "openai_responses.py", '`base_url="URL/v1"`, any `api_key`'),
    Client(
        "guidellm",
        ("guidellm==0.8.1",),
        "guidellm_defaults.py",
        "`--backend kind=openai_http,target=URL`; the model's folder as `--tokenizer`",
    ),
    Client("aiperf", ("aiperf==0.13.0",), "aiperf_defaults.py", "`--url URL`; the model's folder as `--tokenizer`"),
    Client(
        "litellm",
        ("litellm==1.106.2",),
        "litellm_turns.py",
        '`model="openai/MODEL"` or `"hosted_vllm/MODEL"`, `api_base="URL/v1"`, any `api_key`',
    ),
    Client(
        "lm-eval",
        ("lm-eval[api]==0.4.13", "transformers==5.23.0"),
        "lm_eval_scores.py",
        '`local-completions` with `base_url="URL/v1/completions"`; `tokenizer_backend="remote"`, or the model\'s '
        "folder as `tokenizer`",
    ),
    Client(
        "pydantic-ai",
        ("pydantic-ai-slim[openai]==2.68.0",),
        "pydantic_ai_agent.py",
        '`OpenAIChatModel` with `OpenAIProvider(base_url="URL/v1")`',
    ),
    Client(
        "instructor",
        ("instructor==1.17.0",),
        "instructor_models.py",
        "`from_openai`, with the settings of openai",
        is_tuned_for=False,
    ),
    Client(
        "langchain",
        ("langchain-openai==1.7.3",),
        "langchain_chains.py",
        '`base_url="URL/v1"`, any `api_key`; `check_embedding_ctx_length=False` for `OpenAIEmbeddings`',
        is_tuned_for=False,
    ),
    Client(
        "inspect",
        ("inspect-ai==0.3.285", "openai==3.54.0"),
        "inspect_eval.py",
        '`openai-api/tandem/MODEL` or `vllm/MODEL` with `base_url="URL/v1"`',
        is_tuned_for=False,
    ),
    Client(
        "openai-agents",
        ("openai-agents==0.24.0",),
        "agents_runs.py",
        '`AsyncOpenAI(base_url="URL/v1")`; `set_tracing_disabled(True)`',
        is_tuned_for=False,
    ),
    Client(
        "ai-sdk",
        ("ai@6.0.325", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7"),
        "ai_sdk.mjs",
        '`createOpenAICompatible({ baseURL: "URL/v1", includeUsage: true, supportsStructuredOutputs: true })`',
        is_for_node=True,
        is_tuned_for=False,
    ),
    Client("anthropic", ("anthropic==2.14.0",), "anthropic_messages.py", '`base_url="URL"`, any `api_key`'),
)
LITELLM_PROXY = Client(
    "litellm-proxy",
    ("litellm[proxy]==1.106.2",),
    "",
    "`model: openai/MODEL`, `api_base: URL/v1`; `cancel_on_disconnect: true` ends whole answers with their clients",
)
# Programs of the machine, by row of the table, with their settings.
PROGRAMS = {
    "nginx-stock": "none: as Debian installs it, with `gzip` for all types",
    "nginx-documented": "as in [deploy.md](deploy.md#behind-nginx)",
    "curl": "`--http2`, which offers HTTP/2 in an `Upgrade`",
    "java.net.http": "none: `HttpClient.newHttpClient()` offers HTTP/2 in an `Upgrade`",
}
NAMES = (*(client.name for client in CLIENTS), LITELLM_PROXY.name, *PROGRAMS)
