"""Fields of other APIs and servers that change a prompt. They are refused on every path that does not serve them.

An ignored one would lose a conversation, or answer another prompt, without a word.
"""

from tandem.router.frontends.openai.lenient import Unserved

_NOT_KEPT = "conversations are not kept by this API: send all messages, or use /v1/responses"
_REASONING = "switches of the chat template are sent in chat_template_kwargs"
_NOT_CUT = "it does not cut prompts here: send only the part to read"
_NO_SOURCES = "no search and no stored documents here: send the text itself"
_FIRST_MESSAGE = "send a message of role system"


def _refused(why: str, *taken: object) -> Unserved:
    return Unserved(why, taken)


FOREIGN_PROMPTS = {
    # Conversations kept by a server.
    "previous_message_id": _refused(_NOT_KEPT),
    "thread": _refused(_NOT_KEPT),
    "compaction": _refused("shortening a conversation by a summary is not supported by this server"),
    "context": _refused(_NOT_KEPT, []),
    "session_params": _refused("going on with a session is not supported by this server", {}),
    # Additions and cuts.
    "safe_prompt": _refused(_FIRST_MESSAGE, False),
    "prompt_mode": _refused(_FIRST_MESSAGE),
    "plugins": _refused(_NO_SOURCES, []),
    "data_sources": _refused(_NO_SOURCES, []),
    "search_parameters": _refused(_NO_SOURCES),
    "transforms": _refused(_NOT_CUT, []),
    "num_ctx": _refused("the model's length is the server's: send only the part to read"),
    "num_keep": _refused(_NOT_CUT, 0),
    "n_keep": _refused(_NOT_CUT, 0),
    # Templates.
    "enable_thinking": _refused(_REASONING),
    "thinking": _refused(_REASONING),
    "think": _refused(_REASONING),
    "template": _refused("a chat template of the request's own is not supported by this server", ""),
    "chat_template": _refused("a chat template of the request's own is not supported by this server"),
    "raw": _refused("a text without a chat template is the prompt of /v1/completions", False),
    # Other forms.
    "input_ids": _refused("token ids are taken as the prompt of /v1/completions"),
    "input_embeds": _refused("embeddings as prompts are not supported by this server"),
    "prompt_embeds": _refused("embeddings as prompts are not supported by this server"),
    "images": _refused("images are not supported by this server", []),
    # Ollama's object of options: some change the prompt, others the sampling.
    "options": _refused("options are fields of the body here, for example max_tokens and temperature", {}),
}
# On paths other than completions, chats and embeddings.
TRUNCATION = {"truncate_prompt_tokens": _refused(_NOT_CUT)}
# On paths where a prompt is `prompt` or `messages`.
OTHER_CONVERSATIONS = {
    "system": _refused(_FIRST_MESSAGE, ""),
    "previous_response_id": _refused(_NOT_KEPT),
    "conversation": _refused(_NOT_KEPT),
    "instructions": _refused(f"{_FIRST_MESSAGE}, or use /v1/responses"),
    "input": _refused("input is for /v1/responses"),
}
