"""The tables of `tandem status`."""

import pytest

from tandem.deploy.cli.status_tables import print_status
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


def test_workers_are_sorted_by_name_and_number_with_their_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("prefill-1", "decode-10", "decode-2")
    workers = [pb.WorkerStatus(worker_id=name, role="both", address="10.0.0.7:4000", pid=9) for name in names]
    print_status(pb.ServerInfo(model="m", ready=True, workers=workers))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [line[:4] for line in lines if "10.0.0.7" in line]
    assert rows == [[name, "both", "10.0.0.7", "9"] for name in ("decode-2", "decode-10", "prefill-1")]


def test_workers_of_several_ranks_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    workers = [
        pb.WorkerStatus(worker_id="prefill-0", pid=7, follower_pids=[8, 9, 10]),
        pb.WorkerStatus(worker_id="decode-0", pid=11),
    ]
    print_status(pb.ServerInfo(model="m", ready=True, workers=workers))
    shown = capsys.readouterr().out
    assert "prefill-0 (4 ranks)" in shown and "decode-0 (" not in shown


def test_numbers_that_follow_the_load_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    size = pb.SizeStatus(
        kind="any", low=1, high=8, target=4, ready=2, starting=1, start_s=9.6, reason="load", no_room="no room: 0 GPU"
    )
    print_status(pb.ServerInfo(model="m", ready=True, sizes=[size]))
    shown = capsys.readouterr().out
    (row,) = [line.split() for line in shown.splitlines() if "1:8" in line]
    assert row == ["workers", "1:8", "4", "2", "1", "0", "10", "s", "load"]
    assert "no more workers: no room: 0 GPU" in shown


def test_names_of_the_server_cannot_write_control_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    print_status(pb.ServerInfo(model="[red]\x1b]0;m\x07", not_ready_reason="\x1b[2J"))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\x07" not in shown
    assert r"[red]\x1b]0;m\x07" in shown and r"\x1b[2J" in shown


def test_how_long_forwards_take_is_shown_of_the_kinds_that_each_worker_has(capsys: pytest.CaptureFixture[str]) -> None:
    times = pb.ForwardTimes(
        prefill_s=2.4e-3,
        prompt_token_s=22e-6,
        attended_token_s=7e-10,
        step_s=4.3e-3,
        request_s=7.7e-6,
        kv_token_s=32e-9,
    )
    busy = pb.ForwardTimes()
    busy.CopyFrom(times)
    busy.gap_beside_prompts_s = 0.0221
    workers = [
        pb.WorkerStatus(worker_id=f"{role}-0", role=role, stats=pb.WorkerStats(forward_times=said))
        for role, said in (("prefill", times), ("decode", times), ("both", busy))
    ]
    # A new worker has not reported yet.
    workers.append(pb.WorkerStatus(worker_id="both-1", role="both"))
    print_status(pb.ServerInfo(model="m", ready=True, workers=workers))
    lines = capsys.readouterr().out.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("passes")) :]
    assert [line.split() for line in table[1:]] == [
        ["both-0", "2.4", "22.0", "4.3", "7.7", "32.0", "22.1"],
        ["decode-0", "4.3", "7.7", "32.0"],
        ["prefill-0", "2.4", "22.0"],
    ]
    assert max(map(len, table)) <= 80


def test_cached_tokens_are_shown_by_tier_once_a_worker_has_loaded_some(capsys: pytest.CaptureFixture[str]) -> None:
    warm = pb.WorkerStats(prefix_cached_tokens=96, prefix_host_tokens=64, prefix_disk_tokens=16)
    cold = pb.WorkerStats(prefix_cached_tokens=32)
    for stats in (cold, warm):
        workers = [pb.WorkerStatus(worker_id="p-0", stats=stats), pb.WorkerStatus(worker_id="p-1", stats=cold)]
        print_status(pb.ServerInfo(model="m", ready=True, workers=workers))
        lines = capsys.readouterr().out.splitlines()
        tables = [[line.split() for line in lines[i:][1:3]] for i, line in enumerate(lines) if "cached tokens" in line]
        assert tables == ([[["p-0", "16", "64", "16", "0"], ["p-1", "32", "0", "0", "0"]]] if stats is warm else [])


def test_page_stores_are_shown_with_their_pages(capsys: pytest.CaptureFixture[str]) -> None:
    store = pb.StoreStatus(
        store_id="store-0",
        pid=7,
        address="127.0.0.1:99",
        alive=True,
        num_slots=8000,
        num_host_pages=5000,
        num_disk_pages=70000,
        num_disk_bytes=146_800_640_000,
    )
    print_status(pb.ServerInfo(model="m", ready=True, stores=[store]))
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("store-0")]
    assert rows == [["store-0", "7", "127.0.0.1:99", "8000", "5000", "70000", "146.80"]]
    off = pb.StoreStatus(store_id="store-0", pid=7, address="127.0.0.1:99", num_slots=8000, is_disk_off=True)
    print_status(pb.ServerInfo(model="m", ready=True, stores=[off]))
    assert "store-0 7 127.0.0.1:99 8000 0 off 0.00" in " ".join(capsys.readouterr().out.split())
    print_status(pb.ServerInfo(model="m", ready=True))
    assert "on disk" not in capsys.readouterr().out


def test_drafts_are_shown_by_source_once_there_are_some(capsys: pytest.CaptureFixture[str]) -> None:
    ngram = pb.Drafted(source="ngram", num_proposals=20, num_tokens=80, num_accepted=30)
    for drafted in ([pb.Drafted(source="ngram")], [ngram, pb.Drafted(source="shared")]):
        worker = pb.WorkerStatus(worker_id="d-0", stats=pb.WorkerStats(drafted=drafted))
        print_status(pb.ServerInfo(model="m", ready=True, workers=[worker]))
        lines = capsys.readouterr().out.splitlines()
        tables = [line.split() for i, line in enumerate(lines) if lines[i - 1].startswith("speculation")]
        assert tables == ([["d-0", "ngram", "80", "30", "38%", "1.5"]] if drafted[0] is ngram else [])
