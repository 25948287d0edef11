"""What the terminal shows of a cluster."""

import pytest

from cli.terminal import print_status
from tandem.v1 import inference_pb2 as pb


def test_links_to_workers_that_have_left_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shipped = [
        pb.Shipped(transport="tcp", num_pages=3, num_bytes=10**9, receiver_id=name, copying_ns=10**9 // 2)
        for name in ("decode-0", "decode-1")
    ]
    stats = pb.WorkerStats(shipped=shipped)
    workers = [pb.WorkerStatus(worker_id="prefill-0", stats=stats), pb.WorkerStatus(worker_id="decode-0")]
    print_status(pb.ServerInfo(model="m", ready=True, workers=workers))
    shown = capsys.readouterr().out
    links = [line.split() for line in shown.splitlines() if " tcp " in line]
    assert links == [["prefill-0", "decode-0", "tcp", "3", "1.00", "2.00"]]
