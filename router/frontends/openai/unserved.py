"""Unserved fields of OpenAI's, vLLM's, SGLang's and other servers' bodies: some accept only neutral values, others have
no effect.

A field that becomes served moves to its class in schema.py or tools_schema.py.
"""

from dataclasses import replace

from tandem.router.frontends.openai.foreign_prompts import FOREIGN_PROMPTS, OTHER_CONVERSATIONS
from tandem.router.frontends.openai.lenient import Unserved


def _not_supported(what: str, *taken: object) -> Unserved:
    return Unserved(f"{what} not supported by this server", taken)


def _called(name: str, *taken: object) -> Unserved:
    return Unserved(f"this field is called {name} here", taken)


_PENALTY = _not_supported("beam search, which this is for, is", 1)
_BEAMS = _not_supported("beam search is", False)
_OTHER_SAMPLERS = {
    # Samplers of llama.cpp and text-generation-webui, switched off.
    "typical_p": _not_supported("typical sampling is", 1),
    "tfs_z": _not_supported("tail-free sampling is", 1),
    "top_a": _not_supported("top-a sampling is", 0),
    "mirostat": _not_supported("mirostat is", 0),
    "mirostat_mode": _not_supported("mirostat is", 0),
    "xtc_probability": _not_supported("XTC sampling is", 0),
    "dry_multiplier": _not_supported("DRY sampling is", 0),
    "dynatemp_range": _not_supported("a temperature that changes is", 0),
    "guidance_scale": _not_supported("classifier-free guidance is", 1),
}

_OLLAMA = {
    "num_predict": _called("max_tokens"),
    "format": _called("response_format", ""),
    "repeat_penalty": _called("repetition_penalty", 1),
    "repeat_last_n": Unserved("penalties cover the whole text here", (-1,)),
    "penalize_newline": Unserved("penalties cover every token here", (True,)),
}

REQUEST = {
    **FOREIGN_PROMPTS,
    **OTHER_CONVERSATIONS,
    **_OLLAMA,
    "best_of": Unserved("best_of other than 1 is not supported by this server: ask for n outputs and choose", (1,)),
    "use_beam_search": _BEAMS,
    "length_penalty": _PENALTY,
    "early_stopping": _BEAMS,
    "num_beams": _not_supported("beam search is", 1),
    "max_new_tokens": _called("max_tokens"),
    "n_predict": _called("max_tokens"),
    "stop_sequences": _called("stop", []),
    "include_stop_str_in_output": Unserved("a stop string is never part of the text here", (False,)),
    "no_stop_trim": Unserved("a stop string is never part of the text here", (False,)),
    "stop_regex": _not_supported("stopping at a regular expression is", []),
    "skip_special_tokens": Unserved("special tokens are never part of the text here", (True,)),
    "bad_words": _not_supported("forbidding words is", []),
    "logits_processors": _not_supported("logits processors are", []),
    "logits_processors_args": _not_supported("logits processors are", {}),
    "custom_logit_processor": _not_supported("logits processors are", ""),
    "repetition_detection": _not_supported("repetition detection is", False),
    "thinking_token_budget": _not_supported("a limit on reasoning is"),
    "return_tokens_as_token_ids": Unserved("tokens are not named by ids here: use return_token_ids", (False,)),
    "return_hidden_states": _not_supported("hidden states in answers are", False),
    "kv_transfer_params": _not_supported("handing over caches from elsewhere is", {}),
    "lora_path": _not_supported("LoRA adapters are", []),
    "structural_tag": _not_supported("structural tags are"),
    "guided_json_object": _called("structured_outputs.json_object", False),
    "guided_whitespace_pattern": _not_supported("a pattern for white space is"),
    "regex": _called("structured_outputs.regex"),
    "ebnf": _called("structured_outputs.grammar"),
    "json_schema": _called("structured_outputs.json"),
    "grammar": _called("structured_outputs.grammar"),
    **_OTHER_SAMPLERS,
}
REQUEST_HINTS = frozenset(
    {
        # The caller's own records.
        "user",
        "metadata",
        "safety_identifier",
        "request_id",
        "rid",
        # Speed, place and price, and OpenAI's own models.
        "service_tier",
        "store",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "cache_prompt",
        "id_slot",
        # Place and speed at Ollama; rates of samplers that are off.
        "keep_alive",
        "num_batch",
        "num_gpu",
        "num_thread",
        "main_gpu",
        "use_mmap",
        "numa",
        "mirostat_eta",
        "mirostat_tau",
        "data_parallel_rank",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "guided_decoding_backend",
        "prediction",
        "verbosity",
        "custom_params",
        "vllm_xargs",
        # Texts have no special tokens.
        "spaces_between_special_tokens",
        # Images and sounds are refused where they appear.
        "mm_processor_kwargs",
        "media_io_kwargs",
    }
)

COMPLETION = {
    "messages": Unserved("messages are for /v1/chat/completions"),
    "top_logprobs": Unserved("of completions the number of alternatives is called logprobs", (0,)),
    "max_completion_tokens": _called("max_tokens"),
    "add_special_tokens": _not_supported("leaving out the tokens that a prompt begins with is", True),
}

_BEFORE_TOOLS = Unserved("the API of before tools is not supported by this server: use tools, tool_choice, tool_calls")
_WITHOUT_REASONING = "leaving a model's reasoning out of answers, or among their content, is"
CHAT = {
    "functions": replace(_BEFORE_TOOLS, taken=([],)),
    "function_call": replace(_BEFORE_TOOLS, taken=("none", "auto")),
    "include_reasoning": _not_supported(_WITHOUT_REASONING, True),
    "separate_reasoning": _not_supported(_WITHOUT_REASONING, True),
    "stream_reasoning": _not_supported("reasoning that comes only when it is whole is", True),
    "prompt": Unserved("prompt is for /v1/completions"),
    "suffix": _not_supported("suffix is", ""),
    "audio": _not_supported("audio is"),
    "web_search_options": _not_supported("searching the web is"),
    "add_special_tokens": _not_supported("special tokens besides those of the chat template are", False),
}

STRUCTURED_OUTPUTS = {
    "structural_tag": _not_supported("structural tags are"),
    "whitespace_pattern": _not_supported("a pattern for white space is"),
    "disable_any_whitespace": _not_supported("JSON without any white space is", False),
    "disable_additional_properties": Unserved("say additionalProperties: false in the schema", (False,)),
}
STRUCTURED_OUTPUTS_HINTS = frozenset({"backend", "disable_fallback"})

MESSAGE = {
    "function_call": _BEFORE_TOOLS,
    "audio": _not_supported("audio is"),
    "images": _not_supported("images are", []),
    "prefix": _not_supported("going on with the last message is", False),
}
MESSAGE_HINTS = frozenset(
    {
        "annotations",
        # Repeats `reasoning`.
        "reasoning_details",
        "provider_specific_fields",
        "cache_control",
        "id",
    }
)
PART_HINTS = frozenset({"cache_control", "annotations", "id", "provider_specific_fields"})
_IMAGES, _AUDIO, _VIDEOS, _FILES = (
    f"{what} not supported by this server" for what in ("images are", "audio is", "videos are", "files are")
)
# Content parts other than text, by type.
PARTS = {
    **dict.fromkeys(("image_url", "input_image", "image", "image_embeds", "image_pil"), _IMAGES),
    **dict.fromkeys(("input_audio", "audio_url", "audio"), _AUDIO),
    **dict.fromkeys(("video_url", "input_video", "video"), _VIDEOS),
    **dict.fromkeys(("file", "input_file", "document"), _FILES),
}
