"""Short chat templates in the common formats, and tokenizers for them."""

import functools
import tempfile
from pathlib import Path

from tokenizers import AddedToken

from tandem.router.text.tokenizer import Tokenizer
from tests.fakes.tokenizer_files import byte_level, save

_QWEN_HEAD = """{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nAnswer with <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
"""
_QWEN_TOOL = """{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
"""
QWEN25 = (
    _QWEN_HEAD
    + """{%- if message.role == 'user' or (message.role == 'system' and not loop.first)
    or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}{{- tool_call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
"""
    + _QWEN_TOOL
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
QWEN3 = (
    _QWEN_HEAD
    + """{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content is string and loop.last %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content }}
{%- for tool_call in message.tool_calls or [] %}
{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{%- if tool_call.arguments is string %}{{- tool_call.arguments }}
{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
"""
    + _QWEN_TOOL
    + """{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
)
LLAMA31 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system_message + '<|eot_id|>' }}
{%- if tools is not none %}
{%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nAnswer with {"name": NAME, "parameters": OBJECT}.\\n\\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if message.content is mapping %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}
{{- '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
MISTRAL = """{%- set user_messages = messages | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}
{%- if tools is not none and message == user_messages[-1] %}
{{- '[AVAILABLE_TOOLS][' }}
{%- for tool in tools %}{{- tool | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}
{{- '][/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST]' + message['content'] + '[/INST]' }}
{%- elif message['tool_calls'] is defined and message['tool_calls'] is not none %}
{{- '[TOOL_CALLS][' }}
{%- for call in message['tool_calls'] %}
{%- if call.id is not defined or call.id | length != 9 %}{{- raise_exception('ids have 9 characters') }}{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}
{{- ']</s>' }}
{%- elif message['role'] == 'assistant' %}{{- message['content'] + '</s>' }}
{%- elif message['role'] == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{- raise_exception('ids have 9 characters') }}{%- endif %}
{{- '[TOOL_RESULTS]{"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('only users, assistants and tools') }}
{%- endif %}
{%- endfor %}"""
# Opens the reasoning itself and concatenates call arguments with other text.
DEEPSEEK_R1 = """{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{- '<User>' + message['content'] }}
{%- elif message['role'] == 'system' %}{{- message['content'] }}
{%- elif message['role'] == 'tool' %}{{- '<Result>' + message['content'] }}
{%- elif 'tool_calls' in message %}
{%- for call in message['tool_calls'] %}
{{- '<Call>' + call['function']['name'] + '\\n' + call['function']['arguments'] }}
{%- endfor %}
{%- else %}{{- '<Assistant>' + message['content'].split('</think>')[-1] + '</s>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<Assistant><think>\\n' }}{%- endif %}"""
# Supports neither tools nor calls.
SMOLLM2 = """{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

EOS = 257
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
TEXTS = ("<tool_call>", "</tool_call>", "</think>")


@functools.cache
def tokenizer(template: str, special: tuple[str, ...] = SPECIAL) -> Tokenizer:
    """Return a byte-level tokenizer with special tokens and added text tokens; `</s>` ends an output."""
    raw = byte_level()
    raw.add_special_tokens([AddedToken(text) for text in special])
    raw.add_tokens([AddedToken(text) for text in TEXTS if text not in special])
    config = {"vocab_size": raw.get_vocab_size(), "eos_token_id": EOS}
    with tempfile.TemporaryDirectory() as directory:
        made = Tokenizer(save(Path(directory), raw, config, chat_template=template))
        # The template is read on first use, so read it before the directory goes.
        assert made.chat_format
    return made
