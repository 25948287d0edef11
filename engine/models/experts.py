"""Sizes and routing of a mixture of experts. Imports no torch."""

from dataclasses import dataclass, field
from typing import Literal

from tandem.engine.models.checks import require_count, require_positive

# The largest published models have 512.
MAX_EXPERTS = 4096

Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Routing:
    """Choice of each token's experts; formula in layers/experts/routing.py.

    Attributes:
        scoring: how logits become scores.
        num_chosen: experts per token.
        normalize: True if the weights of the chosen experts are divided by their sum.
        scaling: factor of all weights.
        has_bias: True if a bias per expert is added to the scores for the choice alone.
        num_groups, num_groups_used: experts in groups, of which only the best are candidates.
        num_ranked: best experts of a group whose scores add up to the group's.
        float32_logits: True if logits are computed in float32; for "sigmoid" they always are.

    Raises:
        ValueError: on construction, for invalid values.
    """

    scoring: Scoring
    num_chosen: int
    normalize: bool = False
    scaling: float = 1.0
    has_bias: bool = False
    num_groups: int = 1
    num_groups_used: int = 1
    num_ranked: int = 2
    float32_logits: bool = False

    def __post_init__(self) -> None:
        if self.scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"scoring must be softmax or sigmoid, not {self.scoring!r}")
        require_count("num_experts_per_tok", self.num_chosen, MAX_EXPERTS)
        if not isinstance(self.normalize, bool):
            raise ValueError(f"norm_topk_prob must be true or false, not {self.normalize!r}")
        require_positive("routed_scaling_factor", self.scaling)
        require_count("n_group", self.num_groups, MAX_EXPERTS)
        require_count("topk_group", self.num_groups_used, MAX_EXPERTS)
        require_count("num_ranked", self.num_ranked, MAX_EXPERTS)
        if self.num_groups_used > self.num_groups:
            raise ValueError(f"topk_group {self.num_groups_used} is more than n_group {self.num_groups}")


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names in a checkpoint, below model.layers.N.

    Attributes:
        mlp: module of the mixture.
        gate, up, down: projections of an expert.
        shared: module of the shared expert; shared_gate: its gate.
        bias: Routing.has_bias's tensor.
    """

    mlp: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"
    bias: str = "gate.e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """
    Attributes:
        num_experts: of a layer, without the shared expert.
        intermediate_size: of one expert.
        shared_intermediate_size: of the expert that every token takes; 0: none.
        shared_gate: True if a sigmoid weighs the shared expert.
        dense_layers: layers with a dense MLP instead.
        count_key, size_key: keys of config.json for num_experts and intermediate_size, for messages. Either name of a
            count makes the same model, so count_key does not affect equality or fingerprints.

    Raises:
        ValueError: on construction, for invalid values.
    """

    num_experts: int
    intermediate_size: int
    routing: Routing
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()
    names: ExpertNames = ExpertNames()
    count_key: str = field(default="num_experts", compare=False)
    size_key: str = "moe_intermediate_size"

    def __post_init__(self) -> None:
        require_count(self.count_key, self.num_experts, MAX_EXPERTS)
        require_count(self.size_key, self.intermediate_size)
        require_count("shared_expert_intermediate_size", self.shared_intermediate_size, least=0)
        ranked = self.routing.num_ranked
        chosen, groups, used = self.routing.num_chosen, self.routing.num_groups, self.routing.num_groups_used
        count = f"{self.count_key} {self.num_experts}"
        if chosen > self.num_experts:
            raise ValueError(f"num_experts_per_tok {chosen} is more than {count}")
        if self.num_experts % groups:
            raise ValueError(f"{count} is not a multiple of n_group {groups}")
        if groups > 1 and self.num_experts < ranked * groups:
            raise ValueError(f"n_group {groups} leaves fewer than {ranked} of {count} in a group")
        most = self.num_experts // groups * used
        if chosen > most:
            raise ValueError(f"num_experts_per_tok {chosen} is more than the {most} experts of topk_group {used}")

    def sparse_layers(self, num_layers: int) -> list[int]:
        return [layer for layer in range(num_layers) if layer not in self.dense_layers]

    def num_sparse_layers(self, num_layers: int) -> int:
        return num_layers - len(self.dense_layers)

    def num_touched(self, num_tokens: int) -> float:
        """Expected number of distinct experts that a batch chooses in a layer, if all are equally likely.

        E * (1 - (1 - k / E) ** n): each of n tokens misses a given expert with probability 1 - k / E.
        """
        return self.num_experts * (1 - (1 - self.routing.num_chosen / self.num_experts) ** num_tokens)
