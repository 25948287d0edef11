import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from tandem.engine.attention.scales import KvScales
from tandem.engine.models.base import Model
from tandem.engine.models.config import ModelConfig

# Fit for a CPU's cache, and enough to keep a GPU busy in the memory beside its weights.
_CHUNK_ELEMENTS = {"cpu": 2**16, "cuda": 2**25}
_WORD_BYTES = 4
_SEED = 20
# Fields of ModelConfig that do not count while they have these values: earlier versions, which a rolling upgrade links
# with this one, lack them.
_NEWER_FIELDS: Mapping[str, object] = {
    "whole_qk_norm": False,
    "experts": None,
    "latent": None,
    "indexer": None,
    "extra_layers": (),
}


@torch.inference_mode()
def model_fingerprint(model: Model, kv_scales: KvScales | None = None) -> str:
    """Returns a short hex digest, equal where two processes compute with equal weights in the same way.

    It covers the configuration and all bits of all loaded tensors, in checkpoint order, independent of device and
    memory layout. Scales for quantized pages always count; missing ones count as ones.

    Each row of a matrix becomes the sum, modulo 2**64, of its 32-bit words times fixed random odd numbers, independent
    of the order of addition. Two given different rows have equal sums with a probability below 2**-31. The host hashes
    the sums. Crafted weights could still collide.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([type(model).__name__, _described(model.config)], sort_keys=True).encode())
    with _one_thread():
        for name, tensor in sorted(model.stacked_parameters(), key=lambda named: named[0]):
            digest.update(json.dumps([name, list(tensor.shape), str(tensor.dtype)]).encode())
            digest.update(_row_sums(tensor).cpu().numpy().tobytes())
    if kv_scales is not None and not kv_scales.are_ones:
        digest.update(json.dumps([kv_scales.keys, kv_scales.values]).encode())
    return digest.hexdigest()


def _described(config: ModelConfig) -> dict[str, Any]:
    fields = dataclasses.asdict(config)
    if fields["experts"] is not None:
        # For messages alone.
        del fields["experts"]["count_key"]
    return {name: value for name, value in fields.items() if name not in _NEWER_FIELDS or value != _NEWER_FIELDS[name]}


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Makes torch compute on one CPU thread. Several would wait for each other after each of thousands of short
    operations, on a busy machine for a time slice each."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _row_sums(tensor: torch.Tensor) -> torch.Tensor:
    most_elements = _CHUNK_ELEMENTS[tensor.device.type]
    if tensor.dim() > 2 and not tensor.is_contiguous():
        # Flattened at once, all experts' matrices would be copied.
        num_matrices = max(1, most_elements // max(1, tensor[0].numel()))
        return torch.cat([_row_sums(matrices.contiguous()) for matrices in tensor.split(num_matrices)])
    rows = tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.view(1, -1)
    if tensor.itemsize == 1:
        # Not every device can pad FP8.
        rows = rows.view(torch.uint8)
    # A row of an odd number of small elements ends within a word.
    num_padding = -rows.shape[1] % (_WORD_BYTES // min(_WORD_BYTES, tensor.itemsize))
    num_words = (rows.shape[1] + num_padding) * tensor.itemsize // _WORD_BYTES
    generator = torch.Generator().manual_seed(_SEED)
    factors = torch.randint(-(2**63), 2**63 - 1, (num_words,), generator=generator).bitwise_or(1).to(tensor.device)
    num_together = max(1, most_elements // max(1, rows.shape[1]))
    sums = []
    for some in rows.split(num_together):
        padded = F.pad(some, (0, num_padding)) if num_padding else some
        # Rows may be laid out otherwise than in the checkpoint.
        sums.append((padded.contiguous().view(torch.int32) * factors).sum(dim=1))
    return torch.cat(sums)
