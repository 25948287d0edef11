"""Parts of a start, read from the command's output."""

from io import StringIO

import pytest
from rich.console import Console

from benchmarks.start_up import main, print_table, summary, until

LINES = """tandem 0.1.0: starting with the model tiny
   0.5 s  ray: starting
   3.0 s  ray: ready
   3.1 s  prefill-0: starting
   3.2 s  decode-0: starting
   3.2 s  router-0: starting
   4.0 s  prefill-0: importing
   4.4 s  decode-0: importing
   6.4 s  prefill-0: importing, decode-0: importing, router-0: starting
   6.6 s  router-0: ready
   7.5 s  prefill-0: loading weights (0.00 of 1.00 GB)
   9.5 s  prefill-0: loading weights (0.50 of 1.00 GB), decode-0: importing
   9.6 s  decode-0: fingerprinting weights
  10.0 s  prefill-0: warming up
  10.1 s  decode-0: compiling kernels
  10.2 s  decode-0: warming up
  11.0 s  decode-0: capturing graphs (1 of 35)
  11.1 s  prefill-0: loaded
  12.0 s  decode-0: loaded
  12.1 s  prefill-0: ready
  12.1 s  decode-0: ready
Ready after 12.2 s

Serving tiny over gRPC at 127.0.0.1:1 and over HTTP at http://127.0.0.1:2""".splitlines()


def test_part_ends_with_its_last_worker() -> None:
    assert until(LINES) == {
        "Ray is up": 3.0,
        "workers run": 4.4,
        "workers have imported": 9.6,
        "weights are there": 10.1,
        "kernels are compiled": 10.2,
        "warmed up": 11.1,
        "graphs captured, ports open": 12.0,
        "routers serve": 6.6,
        "ready": 12.2,
    }


def test_the_first_run_is_shown_apart() -> None:
    runs = [{"ready": 20.0}, {"ready": 7.0}, {"ready": 9.0}, {"ready": 8.0}]
    assert summary(runs) == {"ready": {"first": 20.0, "median_of_later": 8.0}}
    file = StringIO()
    print_table(runs, Console(file=file, width=120))
    assert "20.0" in file.getvalue() and "8.0" in file.getvalue()
    assert summary(runs[:1]) == {"ready": {"first": 20.0, "median_of_later": 20.0}}


def test_no_run_is_no_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--runs", "0", "--model", "m"])
    assert "--runs must be at least 1" in capsys.readouterr().err
