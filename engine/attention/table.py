"""The attention backends by their names in a configuration (`attention_backend`)."""

from typing import TYPE_CHECKING

from tandem.choices import Choice, Choices

if TYPE_CHECKING:
    from engine.attention.base import AttentionBackend

# This stands in place of a name for the first of the table that computes the model on the device.
AUTO = "auto"

ATTENTION_BACKENDS: "Choices[AttentionBackend]" = Choices(
    "engine.attention.base:AttentionBackend",
    {
        "flashinfer": Choice("engine.attention.flashinfer:FlashInferAttention", ("cuda",)),
        "triton": Choice("engine.attention.triton:TritonAttention", ("cuda",)),
        "reference": Choice("engine.attention.reference:ReferenceAttention"),
    },
)
