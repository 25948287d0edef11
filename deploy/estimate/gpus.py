"""What kinds of GPU can do: figures of data sheets, and how much of them is reached.

Only H200s were measured by this project (docs/benchmarks.md). Of every other kind the same shares of the data sheet's
figures are assumed as an H200 reaches.
"""

from dataclasses import dataclass

from tandem.engine.floors import Limits

GB = 10**9
GIB = 2**30
# An H200 copies 4.15 of 4.8 TB/s, multiplies matrices at 780 of 989 TFLOP/s, and sends scattered pages to another one
# at 382 of 450 GB/s.
COPY_SHARE = 4.15 / 4.8
MATMUL_SHARE = 780 / 989
LINK_SHARE = 382 / 450


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU, by its data sheet.

    Attributes:
        name: as people write it.
        memory: bytes that CUDA can give out; a data sheet's GB count as 10^9 bytes, a few percent less than there are.
        bandwidth: of the memory, bytes per second.
        flops: FLOP per second of bfloat16 matrix products, without sparsity.
        link: bytes per second to another GPU of the host, in one direction.
        has_own_kernels: whether decode steps of few sequences run the project's own kernels, which are for Hopper and
            later.
        source: where the figures are from.
        has_fp8: whether it multiplies FP8 numbers, which takes half as long as bfloat16.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float
    link: float
    has_own_kernels: bool
    source: str
    has_fp8: bool = True

    @property
    def limits(self) -> Limits:
        """What is reached of bandwidth and FLOP/s."""
        return Limits(self.bandwidth * COPY_SHARE, self.flops * MATMUL_SHARE)

    @property
    def reached_link(self) -> float:
        """Bytes per second at which pages arrive at another GPU."""
        return self.link * LINK_SHARE


_ASSUMED = "; shares of them as on an H200 are assumed"

GPUS = {
    # CUDA says of an H200 that it has 139.8 GiB (docs/reports/h200).
    "h200": Gpu(
        "H200",
        int(139.8 * GIB),
        4.8e12,
        989e12,
        450e9,
        True,
        "measured by this project: copies 4.15 TB/s, bfloat16 780 TFLOP/s, pages over NVLink 382 GB/s",
    ),
    "h100": Gpu(
        "H100 SXM", 80 * GB, 3.35e12, 989e12, 450e9, True, f"NVIDIA's data sheet of the H100 Tensor Core GPU{_ASSUMED}"
    ),
    "a100": Gpu(
        "A100 80GB SXM",
        80 * GB,
        2.039e12,
        312e12,
        300e9,
        False,
        f"NVIDIA's data sheet of the A100 80GB Tensor Core GPU{_ASSUMED}",
        has_fp8=False,
    ),
    # It has no NVLink: what it has is PCIe 4.0 with 16 lanes.
    "l40s": Gpu("L40S", 48 * GB, 0.864e12, 362e12, 32e9, False, f"NVIDIA's data sheet of the L40S{_ASSUMED}"),
    "b200": Gpu(
        "B200",
        180 * GB,
        8.0e12,
        2250e12,
        900e9,
        True,
        f"NVIDIA's data sheet of the DGX B200, an eighth of it{_ASSUMED}",
    ),
}
