"""From logits to token ids."""

import torch


class Sampler:
    """Greedy: the token with the largest logit, the lowest id among equals."""

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Args: logits (num_rows, vocab_size) float32. Returns: (num_rows,) int64."""
        return torch.argmax(logits, dim=-1)
