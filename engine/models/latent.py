"""Sizes of latent attention. Imports no torch."""

from dataclasses import dataclass

from tandem.engine.models.checks import require_count


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Attention whose keys and values are projections of one vector per token, the latent (DeepSeek-V2,
    https://arxiv.org/abs/2405.04434, section 2.1).

    Attributes:
        q_rank: size of the queries' latent; 0: queries are projected from the layer's input.
        kv_rank: size of the latent.
        nope_dim: size of a head's queries and keys without rotation.
        rope_dim: size of their rotated part. All heads share that of the keys.
        value_dim: size of a head's values.

    Raises:
        ValueError: on construction, for invalid values.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        require_count("q_lora_rank", self.q_rank, least=0)
        require_count("kv_lora_rank", self.kv_rank)
        require_count("qk_nope_head_dim", self.nope_dim)
        require_count("qk_rope_head_dim", self.rope_dim)
        require_count("v_head_dim", self.value_dim)
        if self.rope_dim % 2:
            raise ValueError(f"qk_rope_head_dim {self.rope_dim} is odd, but the rotary embedding rotates pairs")

    @property
    def qk_dim(self) -> int:
        """Size of a head's queries and keys."""
        return self.nope_dim + self.rope_dim

    @property
    def token_dim(self) -> int:
        """Numbers of a token in a layer's pages: the latent, then the keys' rotated part."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """Choice of the tokens that a query attends to (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 2.1).

    Attributes:
        num_heads: of index queries.
        head_dim: size of index queries and keys.
        top_k: tokens that a query attends to, at most.

    Raises:
        ValueError: on construction, for invalid values.
    """

    num_heads: int
    head_dim: int
    top_k: int

    def __post_init__(self) -> None:
        require_count("index_n_heads", self.num_heads)
        require_count("index_head_dim", self.head_dim)
        require_count("index_topk", self.top_k)
