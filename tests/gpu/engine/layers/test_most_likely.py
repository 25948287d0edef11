"""Argmax with many ties."""

import pytest
import torch


@pytest.mark.parametrize("num_rows", [1, 3, 64, 256])
@pytest.mark.parametrize("vocab_size", [7, 300, 151_669, 151_936])
def test_most_likely(num_rows: int, vocab_size: int) -> None:
    from tandem.engine.layers.most_likely import MostLikely

    kernel = MostLikely(vocab_size, num_rows, torch.device("cuda", 0))
    out = torch.full((num_rows,), -1, dtype=torch.int64, device="cuda")
    for scale in (0.0, 1e-3, 1.0, -1.0):
        # Coarse logits with many ties, both zeros and infinities.
        logits = (torch.randn(num_rows, vocab_size, device="cuda") * 3).round().bfloat16() * scale
        logits[0, vocab_size // 2 :] = -torch.inf
        kernel.find(logits, out)
        largest = logits.amax(dim=1, keepdim=True)
        lowest = torch.where(logits == largest, torch.arange(vocab_size, device="cuda"), vocab_size).amin(dim=1)
        assert torch.equal(out, lowest)
