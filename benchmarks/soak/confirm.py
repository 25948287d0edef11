"""Confirms outputs by transformers' logits and our sampler, in a process of its own.

Batches and restarted attempts round logits differently. A request whose outcome hangs on such a rounding cannot be
compared, so the confirmation also says how wide the margin is.
"""

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.children import questions

# Far above the rounding of float32, far below what a wrong page changes.
NOISE = 1e-3
_NUM_NOISES = 3


def run(pipe: Connection, model_dir: str) -> None:
    """Answer (prompt, output, sampling) by "" or the first token that differs."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    # The same noise in every run.
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32").eval()
    for prompt, output, sampling in questions(pipe):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
            pipe.send(_difference(logits, prompt, output, sampling))


def _difference(logits: Any, prompt: Sequence[int], output: Sequence[int], sampling: dict[str, Any]) -> str:
    import torch

    noises = [torch.zeros_like(logits), *(torch.randn_like(logits) * NOISE for _ in range(_NUM_NOISES))]
    for noise in noises:
        for index, token_id in enumerate(output):
            wanted = _next_token((logits + noise)[index : index + 1], prompt, output[:index], sampling)
            if wanted != token_id:
                about = "a tie" if noise.any() else "wrong"
                return f"{about} at output token {index}: {token_id}, transformers has {wanted}"
    return ""


def _next_token(row: Any, prompt: Sequence[int], output: Sequence[int], sampling: dict[str, Any]) -> int:
    from tandem.engine.sampler import sample
    from tandem.engine.token_sequence import TokenSequence
    from tandem.sampling_params import SamplingParams

    known = {name: value for name, value in sampling.items() if name != "ignore_eos"}
    sequence = TokenSequence([*prompt, *output], len(prompt), [], sampling=SamplingParams(**known))
    return int(sample(row, [sequence]).token_ids)
