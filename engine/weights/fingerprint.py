"""What tells loaded weights apart: a digest of every bit of them, taken where they are."""

import dataclasses
import hashlib
import json

import torch
import torch.nn.functional as F

from tandem.engine.attention.scales import KvScales
from tandem.engine.models.base import Model

# So many elements are looked at in one go: as many as a CPU's cache holds, and enough to keep a GPU busy in memory that
# it has left beside its weights.
_CHUNK_ELEMENTS = {"cpu": 2**16, "cuda": 2**25}
_WORD_BYTES = 4
_SEED = 20


@torch.inference_mode()
def model_fingerprint(model: Model, kv_scales: KvScales | None = None) -> str:
    """A short hex digest, equal where two processes compute with equal weights in the same way.

    It covers the configuration that the model was made with and every bit of every tensor that was loaded into it, in
    the order of the checkpoint, whatever the order in memory. So it is the same on every device, and another where the
    files were replaced after some other process had read them. Scales for quantized pages count as well, whether or not
    pages are quantized; none count as ones.

    Each row of a matrix becomes the sum, modulo 2**64, of its words of 32 bits times fixed random odd numbers, all in
    integers: the device reads its memory once, and in which order it adds is of no consequence. Two given rows that
    differ have equal sums with a probability below 2**-31. The sums are hashed on the host. This is no proof against
    somebody who chooses weights so as to deceive.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([type(model).__name__, dataclasses.asdict(model.config)], sort_keys=True).encode())
    for name, tensor in sorted(model.named_parameters(), key=lambda named: named[0]):
        digest.update(json.dumps([name, list(tensor.shape), str(tensor.dtype)]).encode())
        digest.update(_row_sums(tensor).cpu().numpy().tobytes())
    if kv_scales is not None and not kv_scales.are_ones:
        digest.update(json.dumps([kv_scales.keys, kv_scales.values]).encode())
    return digest.hexdigest()


def _row_sums(tensor: torch.Tensor) -> torch.Tensor:
    """(num_rows,) int64; what has no rows is one."""
    rows = tensor.flatten(1) if tensor.dim() > 1 else tensor.view(1, -1)
    if tensor.itemsize == 1:
        # FP8 numbers cannot be padded everywhere; bytes can.
        rows = rows.view(torch.uint8)
    # A row of an odd number of small elements ends in the middle of a word.
    num_padding = -rows.shape[1] % (_WORD_BYTES // min(_WORD_BYTES, tensor.itemsize))
    num_words = (rows.shape[1] + num_padding) * tensor.itemsize // _WORD_BYTES
    generator = torch.Generator().manual_seed(_SEED)
    factors = torch.randint(-(2**63), 2**63 - 1, (num_words,), generator=generator).bitwise_or(1).to(tensor.device)
    num_together = max(1, _CHUNK_ELEMENTS[tensor.device.type] // max(1, rows.shape[1]))
    sums = []
    for some in rows.split(num_together):
        padded = F.pad(some, (0, num_padding)) if num_padding else some
        # In memory rows need not lie as they do in the checkpoint.
        sums.append((padded.contiguous().view(torch.int32) * factors).sum(dim=1))
    return torch.cat(sums)
