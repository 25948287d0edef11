import pytest
import torch

from tandem.engine.layers.linear import Linear
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.ops import TorchOps
from tandem.engine.layers.ranked_ops import RankedOps
from tests.fakes.rank_threads import ThreadCollectives, ThreadGroup, run_ranks

HIDDEN, INTERMEDIATE = 16, 24
CPU = torch.device("cpu")


def linear(weight: torch.Tensor, *, is_partial: bool = False) -> Linear:
    made = Linear([len(weight)], weight.shape[1], False, weight.dtype, CPU)
    made.weight.copy_(weight)
    made.is_partial = is_partial
    return made


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_ranks_compute_what_one_device_computes(degree: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, HIDDEN, dtype=torch.float64)
    norm = Norm(torch.rand(HIDDEN, dtype=torch.float64), 1e-6)
    gate, up, down = (torch.randn(INTERMEDIATE, HIDDEN, dtype=torch.float64) for _ in range(3))
    expected = TorchOps().gated_mlp(x, norm, linear(torch.cat((gate, up))), linear(down.t()))

    def forward(group: ThreadGroup, collectives: ThreadCollectives) -> torch.Tensor:
        ops, held = RankedOps(TorchOps(), collectives), group.ranks.share(INTERMEDIATE)
        rows = slice(held.start, held.stop)
        gate_up = linear(torch.cat((gate[rows], up[rows])))
        return ops.gated_mlp(x.clone(), norm, gate_up, linear(down[rows].t(), is_partial=True))

    results = run_ranks(degree, forward)
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], expected)


def test_projections_that_every_rank_has_are_not_summed() -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(3, 8), torch.randn(3, HIDDEN), torch.randn(HIDDEN, 8)

    def add(_: ThreadGroup, collectives: ThreadCollectives) -> torch.Tensor:
        return RankedOps(TorchOps(), collectives).linear_add(x, linear(weight), residual.clone())

    alone = TorchOps().linear_add(x, linear(weight), residual.clone())
    assert all(torch.equal(result, alone) for result in run_ranks(2, add))
