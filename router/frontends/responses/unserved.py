"""Fields of the Responses API's bodies that have no meaning here (router/frontends/openai/unserved.py)."""

from tandem.router.frontends.openai import unserved as chat
from tandem.router.frontends.openai.foreign_prompts import FOREIGN_PROMPTS, TRUNCATION
from tandem.router.frontends.openai.lenient import Unserved


def _not_supported(what: str, *taken: object) -> Unserved:
    return Unserved(f"{what} not supported by this server", taken)


def _called(name: str, *taken: object) -> Unserved:
    return Unserved(f"this field is called {name} here", taken)


REQUEST = {
    **FOREIGN_PROMPTS,
    **TRUNCATION,
    "system": _called("instructions", ""),
    "image": _not_supported("images are"),
    "reasoning_effort": _called("reasoning.effort"),
    "prompt": Unserved("prompts are not kept by this server: send instructions and input"),
    "context_management": _not_supported("shortening a conversation is", []),
    "moderation": _not_supported("moderation is"),
    "logprobs": Unserved("this field is called top_logprobs here", (False, 0)),
    "n": Unserved("a response has one output: send the request again for another", (1,)),
    "messages": _called("input"),
    "max_tokens": _called("max_output_tokens"),
    "max_completion_tokens": _called("max_output_tokens"),
    "response_format": _called("text.format"),
    "stop": Unserved("responses have no stop strings: use /v1/chat/completions", ([],)),
    "functions": _called("tools", []),
    "use_beam_search": chat.REQUEST["use_beam_search"],
}
TOOL = {
    "defer_loading": Unserved("all tools are in the prompt here: a search for tools is the client's own", (False,)),
    "allowed_callers": Unserved("tools are called by the model alone", (["direct"],)),
}
REASONING = {"context": Unserved("the chat template chooses the reasoning that it shows", ("auto",))}
REQUEST_HINTS = frozenset(
    {
        # The caller's own records.
        "user",
        "safety_identifier",
        # Speed, place and price, and OpenAI's own models.
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "stream_options",
        # Limits server-side tools.
        "max_tool_calls",
        "verbosity",
        "access_programs",
        "background_options",
    }
)
ITEM_HINTS = frozenset({"id", "status", "phase", "created_by", "annotations", "logprobs", "namespace", "caller"})
