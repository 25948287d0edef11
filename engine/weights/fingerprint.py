import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tandem.engine.attention.scales import KvScales
from tandem.engine.models.base import Weights
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.part import Int64s, Part
from tandem.engine.ranks.group import SINGLE_GROUP, RankGroup

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
def model_fingerprint(model: Weights, kv_scales: KvScales | None = None, group: RankGroup = SINGLE_GROUP) -> str:
    """Returns a short hex digest, equal where two workers compute with equal weights in the same way.

    All ranks of a worker call it, and the worker's number of ranks does not show in it: every rank sums its part of
    each row.

    It covers the configuration and all bits of all loaded tensors, in checkpoint order, independent of device and
    memory layout. Scales for quantized pages always count; missing ones count as ones.

    Each row of a matrix becomes the sum, modulo 2**64, of its 32-bit words times fixed random odd numbers, independent
    of the order of addition. Two given different rows have equal sums with a probability below 2**-31. The host hashes
    the sums. Crafted weights could still collide.

    Raises:
        ValueError: on every rank, the ranks' tensors do not belong to one model.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([type(model).__name__, _described(model.config)], sort_keys=True).encode())
    parts, tensors = model.parts(), sorted(model.stacked_parameters(), key=lambda named: named[0])
    heads = [_head(name, tensor, parts.get(name)) for name, tensor in tensors]
    group.check_equal("the shapes of tensors (digests)", hashlib.blake2b(b"".join(heads), digest_size=8).hexdigest())
    with _one_thread():
        for head, (name, tensor) in zip(heads, tensors, strict=True):
            part = parts.get(name)
            digest.update(head)
            if part is None:
                digest.update(_row_sums(tensor).cpu().numpy().tobytes())
            else:
                digest.update(_sums_of_ranks(tensor, part, group).tobytes())
    if kv_scales is not None and not kv_scales.are_ones:
        digest.update(json.dumps([kv_scales.keys, kv_scales.values]).encode())
    # Of tensors that every rank has whole, the leader's count.
    return group.of_leader(digest.hexdigest())


def _head(name: str, tensor: torch.Tensor, part: Part | None) -> bytes:
    shape = tensor.shape if part is None else part.whole
    return json.dumps([name, list(shape), str(tensor.dtype)]).encode()


def _sums_of_ranks(tensor: torch.Tensor, part: Part, group: RankGroup) -> Int64s:
    """Returns the sums of the whole tensor's rows."""
    held = _row_sums(tensor, part.columns, part.whole[-1]).cpu().numpy()
    sums = np.zeros(math.prod(part.whole[:-1]), np.int64)
    # Several ranks may hold the same part.
    for other, of_rank in dict(group.gathered((part, held))).items():
        # Modulo 2**64, as on the device.
        sums[other.row_indices()] += of_rank
    return sums


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


def _row_sums(tensor: torch.Tensor, columns: slice | None = None, width: int = 0) -> torch.Tensor:
    """Args: columns: of the whole rows, which have `width` numbers, at bounds of words; None: the rows are whole."""
    most_elements = _CHUNK_ELEMENTS[tensor.device.type]
    if tensor.dim() > 2 and not tensor.is_contiguous():
        # Flattened at once, all experts' matrices would be copied.
        num_matrices = max(1, most_elements // max(1, tensor[0].numel()))
        return torch.cat([_row_sums(matrices.contiguous(), columns, width) for matrices in tensor.split(num_matrices)])
    rows = tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.view(1, -1)
    if tensor.itemsize == 1:
        # Not every device can pad FP8.
        rows = rows.view(torch.uint8)
    if columns is None:
        columns, width = slice(0, rows.shape[1]), rows.shape[1]
    # A row of an odd number of small elements ends within a word.
    step = _WORD_BYTES // min(_WORD_BYTES, tensor.itemsize)
    num_padding = -rows.shape[1] % step
    num_words = (width + -width % step) * tensor.itemsize // _WORD_BYTES
    generator = torch.Generator().manual_seed(_SEED)
    factors = torch.randint(-(2**63), 2**63 - 1, (num_words,), generator=generator).bitwise_or(1)
    first = columns.start * tensor.itemsize // _WORD_BYTES
    num_held = (rows.shape[1] + num_padding) * tensor.itemsize // _WORD_BYTES
    factors = factors.narrow(0, first, num_held).to(tensor.device)
    num_together = max(1, most_elements // max(1, rows.shape[1]))
    sums = []
    for some in rows.split(num_together):
        padded = F.pad(some, (0, num_padding)) if num_padding else some
        # Rows may be laid out otherwise than in the checkpoint.
        sums.append((padded.contiguous().view(torch.int32) * factors).sum(dim=1))
    return torch.cat(sums)
