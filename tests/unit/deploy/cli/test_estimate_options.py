"""`tandem estimate` refuses impossible options."""

import pytest

from tandem.deploy.cli.main import main


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--workload", "4096"],
            "must be two numbers of tokens, each at least 1, such as 4096/256, or mooncake or azure, not '4096'",
        ),
        (["--workload", "0/5"], "must be two numbers of tokens"),
        (["--workload", "_/5"], "must be two numbers of tokens"),
        (["--slo", "tpot=5ms"], "must be of ttft=TIME and itl=TIME, each once"),
        (["--slo", "itl=5ms,itl=6ms"], "each once"),
        (["--slo", "ttft=500"], "a duration is a number with its unit"),
        (["--slo", "ttft=0ms"], "the limit on ttft must be above 0"),
        (["--itl-objective", "0"], "must be above 0, not 0"),
        (["--gpus", "0"], "must be at least 1"),
        (["--gpus", "2", "--rate", "3"], "not allowed with argument"),
        (["--gpus", "two"], "must be a whole number, not 'two'"),
        (["--chunk-size", "9" * 5000], "must be a whole number"),
        (["--rate", "nan"], "must be above 0"),
        (["--rate", "many"], "must be a number, not 'many'"),
        # These overflow, or round to zero.
        (["--gpu-memory", "1e300"], "must be from 0.1 to 1,000,000, not 1e300"),
        (["--gpu-memory", "1e-300"], "must be from 0.1 to 1,000,000"),
        (["--flops", "inf"], "must be from 0.1 to 1,000,000"),
        (["--host-link", "0"], "must be from 0.1 to 1,000,000"),
        (["--hit-rate", "1.5"], "must be from 0 to 1, not 1.5"),
        (["--store-hit-rate", "nan"], "must be from 0 to 1, not nan"),
        (["--link", "nan"], "must be from 0.1 to 1,000,000"),
        # The search would try all sizes.
        (["--max-batch-size", "100000000"], "must be at most 4,096"),
        (["--mem-fraction-static", "1.5"], "must be between 0 and 1"),
        (["--gpu", "h20"], "did you mean h200?"),
    ],
)
def test_what_cannot_be_right(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["estimate", "--model", "m", "--workload", "1/1", *flags])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
