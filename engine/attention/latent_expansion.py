"""Attention of a prompt's many new tokens to keys and values made of latents, by torch."""

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from tandem.engine.attention.base import LatentHeads
from tandem.engine.attention.latent_gather import gather_latents
from tandem.engine.attention.latent_layout import LatentLayout, LatentPages
from tandem.engine.attention.layout import DTYPE_BYTES
from tandem.engine.attention.page_tables import Int64s
from tandem.engine.attention.scales import KvScales
from tandem.engine.token_sequence import TokenSequence

# For keys and values. Longer sequences are computed over latents.
WORKSPACE_BYTES = 512 * 2**20
# From so many new tokens on, expanding all latents takes fewer operations than absorbed queries.
MIN_NEW_TOKENS = 256
# Of torch's flash attention.
MAX_HEAD_DIM = 256


class LatentExpansion:
    """Keys and values of one sequence and layer at a time, in memory of its own.

    For each head and pair of tokens, attention over latents multiplies 2 * kv_rank + rope_dim numbers; over keys and
    values qk_dim + value_dim, less than a third in published models.

    Attributes:
        max_tokens: of a sequence that has room.
        min_new_tokens: of a prompt that should be expanded.
    """

    def __init__(self, layout: LatentLayout, pages: LatentPages, num_heads: int, kv_scales: KvScales) -> None:
        self._layout = layout
        self._pages = pages
        self._scales = kv_scales.keys
        self.min_new_tokens = MIN_NEW_TOKENS
        self.max_tokens = WORKSPACE_BYTES // (2 * num_heads * MAX_HEAD_DIM * DTYPE_BYTES[layout.dtype])
        # Zeros stay in the padding of values, because all layers have the same sizes.
        shape = 2, self.max_tokens * num_heads * MAX_HEAD_DIM
        self._keys, self._values = torch.zeros(shape, dtype=pages.keys.dtype, device=pages.keys.device)

    def is_faster(self, prompt: TokenSequence) -> bool:
        """Returns True if the prompt should be expanded, and has room."""
        return prompt.extend_len >= self.min_new_tokens and prompt.device_len <= self.max_tokens

    def slots(self, prompt: TokenSequence) -> Int64s:
        """Returns page * page_size + offset in the page of all its tokens: (device_len,)."""
        layout = self._layout
        pages = np.asarray(prompt.page_ids[: layout.num_pages_for(prompt.device_len)], np.int64)
        slots = pages[:, None] * layout.page_size + np.arange(layout.page_size)
        return slots.reshape(-1)[: prompt.device_len]

    def attend(self, q: torch.Tensor, slots: torch.Tensor, heads: LatentHeads, layer: int, out: torch.Tensor) -> None:
        """Causal attention of a prompt's last tokens, whose latents are in their pages.

        Args:
            q: (num_tokens, num_heads, nope_dim + rope_dim), rotated.
            slots: as of `slots`, on the device.
            out: (num_tokens, num_heads * value_dim), overwritten.

        Raises:
            ValueError: a head is larger than torch's flash attention computes.
        """
        num_tokens, num_heads, q_dim = q.shape
        nope_dim, value_dim = heads.keys.shape[1], heads.values.shape[1]
        if max(q_dim, value_dim) > MAX_HEAD_DIM:
            raise ValueError(f"kernels of latents compute heads of at most {MAX_HEAD_DIM}, not {max(q_dim, value_dim)}")
        gathered = gather_latents(self._pages, layer, slots, self._scales[layer])
        latents, k_rope = gathered.split((self._layout.kv_rank, self._layout.rope_dim), dim=-1)
        by_head = latents.expand(num_heads, -1, -1)
        keys = self._view(self._keys, len(slots), num_heads, q_dim)
        torch.bmm(by_head, heads.keys.transpose(1, 2), out=keys[..., :nope_dim])
        keys[..., nope_dim:] = k_rope
        # With other sizes than the keys', torch holds the scores of all pairs.
        values = self._view(self._values, len(slots), num_heads, max(q_dim, value_dim))
        torch.bmm(by_head, heads.values.transpose(1, 2), out=values[..., :value_dim])
        is_whole = len(slots) == num_tokens
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),  # (1, num_heads, num_tokens, nope_dim + rope_dim)
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=None if is_whole else causal_lower_right(num_tokens, len(slots)),
            is_causal=is_whole,
            scale=heads.scale,
        )
        out.view(num_tokens, num_heads, value_dim).copy_(attended[0, ..., :value_dim].transpose(0, 1))

    def _view(self, memory: torch.Tensor, num_tokens: int, num_heads: int, size: int) -> torch.Tensor:
        """Returns (num_heads, num_tokens, size), with a token's heads side by side."""
        return memory[: num_tokens * num_heads * size].view(num_tokens, num_heads, size).transpose(0, 1)
