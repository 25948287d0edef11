"""What is supposed of forwards before anything has been seen of them."""

from tandem.messages import ForwardTimes

# Of an H200 with a model of 8 billion parameters, and of two CPU cores with one of 135 million.
START_TIMES = {
    "cuda": ForwardTimes(5e-3, 23e-6, 1e-9, 4.5e-3, 30e-6, 2e-8),
    "cpu": ForwardTimes(20e-3, 2e-3, 5e-7, 25e-3, 4e-3, 1e-6),
}


def start_times(device: str) -> ForwardTimes:
    """Args: device: "cpu", "cuda" or "cuda:0"."""
    return START_TIMES["cuda" if device.startswith("cuda") else "cpu"]
