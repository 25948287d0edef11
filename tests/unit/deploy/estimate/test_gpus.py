"""Figures of GPUs, their reached shares and their sources."""

from pathlib import Path

import pytest

from tandem.deploy.estimate.gpus import COPY_SHARE, GPUS, HOST_LINK_SHARE, LINK_SHARE, MATMUL_SHARE

PAGE = Path(__file__).parents[4] / "docs/estimate.md"


def test_an_h200_reaches_what_was_measured() -> None:
    limits = GPUS["h200"].limits
    assert limits.copy_bandwidth == pytest.approx(4.15e12)
    assert limits.matmul_rate == pytest.approx(780e12)
    assert GPUS["h200"].reached_link == pytest.approx(382e9)


def test_the_page_says_what_shares_are_assumed_of_other_gpus() -> None:
    words = f"{COPY_SHARE:.2f} of the bandwidth, {MATMUL_SHARE:.2f} of the FLOP/s, {LINK_SHARE:.2f} of the link"
    page = " ".join(PAGE.read_text().split())
    assert words in page and f"{HOST_LINK_SHARE:.2f} of the link to the host" in page


@pytest.mark.parametrize("name", [name for name in GPUS if name != "h200"])
def test_what_was_not_measured_is_said_to_be_a_data_sheets_and_is_not_taken_whole(name: str) -> None:
    gpu = GPUS[name]
    assert "data sheet" in gpu.source and "assumed" in gpu.source and "measured" not in gpu.source
    assert gpu.limits.copy_bandwidth < gpu.bandwidth
    assert gpu.limits.matmul_rate < gpu.flops
    assert gpu.reached_link < gpu.link
