import torch

from tandem.engine.collectives.base import SingleRank


def test_one_rank_has_everything() -> None:
    one, x = SingleRank(), torch.arange(6.0).view(2, 3)
    assert one.all_reduce(x) is x
    assert one.gather_columns(x, 3) is x
    out = torch.empty(2, 3)
    assert one.gather_columns(x, 3, out) is out
    assert torch.equal(out, x)
    assert torch.equal(one.all_reduce_add(x.clone(), torch.ones(2, 3)), x + 1)
