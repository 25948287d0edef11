"""Checks that a model can be cut into ranks. Imports no torch."""

from tandem.engine.models.config import ModelConfig
from tandem.engine.models.quantization import BLOCK, FP8_MULTIPLE
from tandem.engine.ranks.config import MAX_DEGREE, RankConfig


def check_degree(model: ModelConfig, degree: int) -> None:
    """
    Raises:
        ValueError: the model cannot be cut into `degree` ranks; the message of one line names the size that does not
            fit.
    """
    if not 1 <= degree <= MAX_DEGREE:
        raise ValueError(f"a worker has 1 to {MAX_DEGREE} ranks, not {degree}")
    if degree == 1:
        return
    _require_divided("the model's query heads", model.num_q_heads, degree)
    if model.latent is None:
        kv_heads = RankConfig(0, degree).kv_heads(model.num_kv_heads)
        _require_aligned(model, "rows of queries", model.num_q_heads // degree * model.head_dim)
        _require_aligned(model, "rows of keys", kv_heads.num * model.head_dim)
    else:
        _require_aligned(model, "rows of queries", model.num_q_heads // degree * model.latent.qk_dim)
        _require_aligned(model, "values of heads", model.num_q_heads // degree * model.latent.value_dim)
    for what, size in _cut_sizes(model, degree):
        _require_divided(what, size, degree)
        _require_aligned(model, what, size // degree)


def cuts_by_expert(model: ModelConfig, degree: int) -> bool:
    """Returns whether each rank holds whole experts; otherwise it holds a slice of each."""
    return model.experts is not None and model.experts.num_experts % degree == 0


def _cut_sizes(model: ModelConfig, degree: int) -> list[tuple[str, int]]:
    sizes = []
    if any(not model.is_sparse(layer) for layer in range(model.num_layers)):
        sizes.append(("intermediate_size", model.intermediate_size))
    if model.experts is not None:
        if not cuts_by_expert(model, degree):
            sizes.append((model.experts.size_key, model.experts.intermediate_size))
        if model.experts.shared_intermediate_size:
            sizes.append(("the size of the shared expert", model.experts.shared_intermediate_size))
    return sizes


def _require_divided(what: str, size: int, degree: int) -> None:
    if size % degree:
        fitting = [str(number) for number in range(1, MAX_DEGREE + 1) if size % number == 0]
        raise ValueError(f"{degree} ranks cannot share {what}, {size}: use {_either(fitting)}")


def _require_aligned(model: ModelConfig, what: str, size: int) -> None:
    # The fingerprint sums words of four bytes.
    multiple = 4
    if model.quantization is not None:
        multiple = BLOCK if model.quantization.weights == "block" else FP8_MULTIPLE
    if size % multiple:
        raise ValueError(f"each rank would hold {size} of {what}, not a multiple of {multiple}: use fewer ranks")


def _either(numbers: list[str]) -> str:
    *others, last = numbers
    return f"{', '.join(others)} or {last}" if others else last
