"""Talks with a cluster through the stock OpenAI client (`pip install openai`).

    make serve                                           # in another terminal
    .venv/bin/pip install openai && .venv/bin/python examples/openai_client.py

TANDEM_URL (default http://127.0.0.1:8000) and TANDEM_API_KEY select the cluster.
"""

import os

from openai import OpenAI

# The client requires a key; the cluster ignores it unless it was started with keys.
url = os.environ.get("TANDEM_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("TANDEM_API_KEY", "none"))
model = client.models.list().data[0].id

messages = [{"role": "user", "content": "What is the capital of France?"}]
answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=32)
print(answer.choices[0].message.content)
print(answer.usage)

print("\nStreamed, the second turn of the same conversation:")
messages += [
    {"role": "assistant", "content": answer.choices[0].message.content},
    {"role": "user", "content": "And what is it famous for?"},
]
stream = client.chat.completions.create(
    model=model,
    messages=messages,
    temperature=0,
    max_tokens=48,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:
        print("\ncached prompt tokens:", chunk.usage.prompt_tokens_details.cached_tokens)

print("\nThree completions of one prompt; the same seed gives the same three again:")
completions = client.completions.create(
    model=model, prompt="The old lighthouse", n=3, seed=7, temperature=0.8, max_tokens=16, extra_body={"top_k": 40}
)
for choice in completions.choices:
    print(f"{choice.index}: {choice.text!r}")
