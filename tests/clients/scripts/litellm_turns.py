"""Two turns; the second includes the first's answer as the library returned it."""

import litellm
from report import Report

report = Report()
litellm.suppress_debug_info = True


def ask(messages: list, **fields: object):
    return litellm.completion(
        model=f"openai/{report.model}",
        api_base=f"{report.url}/v1",
        api_key="none",
        messages=messages,
        max_tokens=16,
        num_retries=0,
        **fields,
    )


def two_turns() -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    for as_given in (lambda message: message, lambda message: message.model_dump()):
        first = ask(messages).choices[0].message
        turns = [*messages, as_given(first), {"role": "user", "content": "And of Italy?"}]
        assert ask(turns).choices[0].message.content


def streamed() -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    chunks = list(ask(messages, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens > 0


def hosted_vllm() -> None:
    answer = litellm.completion(
        model=f"hosted_vllm/{report.model}",
        api_base=f"{report.url}/v1",
        api_key="none",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=8,
        num_retries=0,
    )
    assert answer.choices[0].finish_reason


def too_long() -> None:
    # The library falls back to another model only on this class.
    try:
        ask([{"role": "user", "content": "word " * 20_000}])
    except litellm.ContextWindowExceededError as error:
        assert "maximum context length is" in str(error)
    else:
        raise AssertionError("the prompt was taken")


report.check("two turns", two_turns)
report.check("a streamed turn with usage", streamed)
report.check("as a vLLM server", hosted_vllm)
report.check("a prompt that is too long is known as that", too_long)
report.end()
