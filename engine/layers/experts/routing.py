"""Choice of each token's experts, in plain torch."""

import torch
import torch.nn.functional as F

from tandem.engine.models.experts import Routing

# Keeps a sum of weights above zero.
SMALLEST_SUM = 1e-20


def router_logits(x: torch.Tensor, weight: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Returns (num_tokens, num_experts) float32.

    Args:
        x: normalized inputs, (num_tokens, hidden_size).
        weight: (num_experts, hidden_size).
    """
    if routing.scoring == "sigmoid" or routing.float32_logits:
        # As the models' authors: scores of many experts are close to each other.
        return F.linear(x.float(), weight.float())
    return F.linear(x, weight).float()


def choose_experts(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the experts of each token and their weights.

    softmax: the largest probabilities (Mixtral, https://arxiv.org/abs/2401.04088). sigmoid: the largest sigmoid + bias;
    weights are without the bias. Only groups whose num_ranked best sum highest are candidates: the best two
    (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.1.2) or the best one (DeepSeek-V2,
    https://arxiv.org/abs/2405.04434, section 2.2.2). Of equal experts or groups, those of the lowest index are chosen.

    Args:
        logits: (num_tokens, num_experts) float32.
        bias: (num_experts,) float32, or None.

    Returns:
        weights: (num_tokens, num_chosen) float32.
        experts: (num_tokens, num_chosen) int64, best first.
    """
    scores = logits.softmax(-1) if routing.scoring == "softmax" else sigmoid(logits)
    ranked = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        ranked = _of_best_groups(ranked, routing)
    experts = _largest(ranked, routing.num_chosen)
    weights = scores.gather(-1, experts)
    if routing.normalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total if routing.scoring == "softmax" else total + SMALLEST_SUM)
    return weights * routing.scaling, experts


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Returns the sigmoid, with rounding that depends on the number alone.

    On a CPU, torch computes a tensor's last elements otherwise. In float64 they differ too little to change the result.
    """
    return x.double().sigmoid().to(x.dtype)


def _of_best_groups(scores: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Returns the scores with -inf outside the best groups."""
    groups = scores.unflatten(-1, (routing.num_groups, -1))
    best = _largest(groups.topk(routing.num_ranked, dim=-1).values.sum(-1), routing.num_groups_used)
    is_used = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, True)
    return groups.masked_fill(~is_used[..., None], float("-inf")).flatten(-2)


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the indices of the largest along the last dimension, best first.

    torch.topk may choose any of equal ones, depending on device and shape. Kernels choose the lowest index.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
