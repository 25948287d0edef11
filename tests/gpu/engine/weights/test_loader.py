import torch

from tandem.engine.weights.loader import dummy_weights


def test_dummy_weights_are_the_same_on_every_device() -> None:
    shapes = [
        ("big.weight", (1200, 1000), torch.bfloat16),
        ("small.weight", (8, 4), torch.float32),
        ("norm.weight", (4,), torch.bfloat16),
        ("q_proj.bias", (4,), torch.float32),
    ]
    on_cpu, on_gpu = dict(dummy_weights(shapes)), dict(dummy_weights(shapes, device="cuda"))
    for name, weight in on_cpu.items():
        assert on_gpu[name].is_cuda and torch.equal(on_gpu[name].cpu(), weight), name
