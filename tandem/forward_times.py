"""Assumed forward times before a worker has measured its own."""

from tandem.messages import ForwardTimes

# An H200 with an 8B model; two CPU cores with a 135M model.
START_TIMES = {
    "cuda": ForwardTimes(5e-3, 23e-6, 1e-9, 4.5e-3, 30e-6, 2e-8),
    "cpu": ForwardTimes(20e-3, 2e-3, 5e-7, 25e-3, 4e-3, 1e-6),
}


def start_times(device: str) -> ForwardTimes:
    return START_TIMES["cuda" if device.startswith("cuda") else "cpu"]
