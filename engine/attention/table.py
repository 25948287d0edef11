"""Attention backends by their names in the configuration (`attention_backend`)."""

from typing import TYPE_CHECKING

from tandem.choices import Choice, Choices

if TYPE_CHECKING:
    from tandem.engine.attention.base import AttentionBackend

AUTO = "auto"

ATTENTION_BACKENDS: "Choices[AttentionBackend]" = Choices(
    "tandem.engine.attention.base:AttentionBackend",
    {
        "flashinfer": Choice("tandem.engine.attention.flashinfer:FlashInferAttention", ("cuda",)),
        "triton": Choice("tandem.engine.attention.triton:TritonAttention", ("cuda",)),
        "latent_triton": Choice("tandem.engine.attention.latent_triton:LatentTritonAttention", ("cuda",)),
        "indexed_triton": Choice("tandem.engine.attention.indexed_triton:IndexedTritonAttention", ("cuda",)),
        "reference": Choice("tandem.engine.attention.reference:ReferenceAttention"),
        "latent_reference": Choice("tandem.engine.attention.latent_reference:LatentReferenceAttention"),
        "indexed_reference": Choice("tandem.engine.attention.indexed_reference:IndexedReferenceAttention"),
    },
)
