"""GPUs by their data sheets, and the reached shares, measured on the H200 only (docs/benchmarks.md)."""

from dataclasses import dataclass, replace

from tandem.engine.floors import Limits

GB = 10**9
GIB = 2**30
# H200: copies in TB/s, matrix products in TFLOP/s, scattered pages over NVLink in GB/s.
COPY_SHARE = 4.15 / 4.8
MATMUL_SHARE = 780 / 989
LINK_SHARE = 382 / 450
# Assumed of copies between GPU and host, over PCIe.
HOST_LINK_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class Gpu:
    """A data sheet, in bytes, bytes/s and dense bfloat16 FLOP/s.

    Attributes:
        memory: available through CUDA; a data sheet's GB count as 10^9 bytes, a few percent too few.
        link: bandwidth to another GPU of the host, one direction.
        host_link: bandwidth from the host's memory, one direction; 0: unknown.
        has_own_kernels: Hopper or later, for Tandem's kernels in small decode steps.
        has_latent_kernels: compute capability 9, for Tandem's kernels of latent attention.
        has_fp8: multiplies FP8, twice as fast as bfloat16.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float
    link: float
    has_own_kernels: bool
    source: str
    has_latent_kernels: bool = False
    has_fp8: bool = True
    host_link: float = 0.0

    def shared_by(self, num_workers: int) -> "Gpu":
        """Returns one worker's view of the GPU, if all are busy: an even share of its rates, and the whole memory."""
        return replace(
            self,
            bandwidth=self.bandwidth / num_workers,
            flops=self.flops / num_workers,
            host_link=self.host_link / num_workers,
        )

    def joined(self, num_ranks: int) -> "Gpu":
        """Returns a worker's view of the GPUs of its ranks: their rates together, and the memory of each."""
        return replace(
            self,
            bandwidth=self.bandwidth * num_ranks,
            flops=self.flops * num_ranks,
            link=self.link * num_ranks,
            host_link=self.host_link * num_ranks,
        )

    @property
    def limits(self) -> Limits:
        return Limits(self.bandwidth * COPY_SHARE, self.flops * MATMUL_SHARE)

    @property
    def reached_link(self) -> float:
        return self.link * LINK_SHARE

    @property
    def reached_host_link(self) -> float:
        return self.host_link * HOST_LINK_SHARE


# PCIe x16, one direction, by generation.
_PCIE_4, _PCIE_5 = 32e9, 64e9
_ASSUMED = "; shares of them as on an H200 are assumed"

GPUS = {
    # CUDA reports 139.8 GiB (docs/reports/h200).
    "h200": Gpu(
        "H200",
        int(139.8 * GIB),
        4.8e12,
        989e12,
        450e9,
        True,
        "measured by this project: copies 4.15 TB/s, bfloat16 780 TFLOP/s, pages over NVLink 382 GB/s",
        has_latent_kernels=True,
        host_link=_PCIE_5,
    ),
    # CUDA reports 79.2 GiB for an "H100 80GB HBM3".
    "h100": Gpu(
        "H100 SXM",
        int(79.2 * GIB),
        3.35e12,
        989e12,
        450e9,
        True,
        f"NVIDIA's data sheet of the H100 Tensor Core GPU, but the memory that CUDA reports{_ASSUMED}",
        has_latent_kernels=True,
        host_link=_PCIE_5,
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
        host_link=_PCIE_4,
    ),
    # No NVLink: PCIe 4.0 x16.
    "l40s": Gpu(
        "L40S",
        48 * GB,
        0.864e12,
        362e12,
        _PCIE_4,
        False,
        f"NVIDIA's data sheet of the L40S{_ASSUMED}",
        host_link=_PCIE_4,
    ),
    "b200": Gpu(
        "B200",
        180 * GB,
        8.0e12,
        2250e12,
        900e9,
        True,
        f"NVIDIA's data sheet of the DGX B200, an eighth of it{_ASSUMED}",
        host_link=_PCIE_5,
    ),
}
