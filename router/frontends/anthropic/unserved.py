"""Fields of the Messages API's bodies that have no meaning here (router/frontends/openai/unserved.py)."""

from tandem.router.frontends.openai import unserved as chat
from tandem.router.frontends.openai.foreign_prompts import FOREIGN_PROMPTS, OTHER_CONVERSATIONS, TRUNCATION
from tandem.router.frontends.openai.lenient import Unserved


def _not_supported(what: str, *taken: object) -> Unserved:
    return Unserved(f"{what} not supported by this server", taken)


def _called(name: str, *taken: object) -> Unserved:
    return Unserved(f"this field is called {name} here", taken)


REQUEST = {
    **{name: field for name, field in FOREIGN_PROMPTS.items() if name != "thinking"},
    **TRUNCATION,
    **{name: field for name, field in OTHER_CONVERSATIONS.items() if name != "system"},
    "container": _not_supported("containers are"),
    "mcp_servers": _not_supported("MCP servers are", []),
    "fallbacks": _not_supported("other models are", []),
    "n": Unserved("a message is one output: send the request again for another", (1,)),
    "stop": _called("stop_sequences", []),
    "max_completion_tokens": _called("max_tokens"),
    "max_tokens_to_sample": _called("max_tokens"),
    "prompt": _called("messages"),
    "response_format": _called("output_config.format"),
    "use_beam_search": chat.REQUEST["use_beam_search"],
}
REQUEST_HINTS = frozenset(
    {
        # The caller's own records.
        "metadata",
        "user_profile_id",
        "workspace_id",
        "betas",
        "billing_policy",
        "fallback_credit_token",
        "diagnostics",
        # Speed, place and price.
        "service_tier",
        "inference_geo",
        "speed",
        "anthropic_version",
    }
)
BLOCK_HINTS = frozenset({"citations", "caller"})
TOOL = {
    "defer_loading": Unserved("all tools are in the prompt here: a search for tools is the client's own", (False,)),
    "allowed_callers": Unserved("tools are called by the model alone", (["direct"],)),
}
TOOL_HINTS = frozenset({"strict", "eager_input_streaming", "display_name"})
# Blocks other than text, by type.
BLOCKS = {
    **{kind: chat.PARTS[kind] for kind in ("image", "audio", "video", "file", "document")},
    "container_upload": chat.PARTS["file"],
}
