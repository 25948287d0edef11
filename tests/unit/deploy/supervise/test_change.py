"""The order of changes: one after the other, past one that waits, urgent ones beside."""

from collections.abc import Generator

import pytest

from tandem.deploy.supervise.change import Change, ChangeError, ChangeJob, ChangeQueue


class Job(ChangeJob):
    def __init__(self, name: str, *, replaces: bool = False) -> None:
        super().__init__()
        self.name = name
        self._replaces = replaces

    def replaces(self, other: ChangeJob) -> bool:
        return self._replaces


class Scripted(Change):
    """Takes num_turns, after a wait until `has_node`."""

    def __init__(self, job: Job, log: list[str], num_turns: int = 2, *, waits: bool = False) -> None:
        super().__init__(job, self._run(job.name, log, num_turns, waits))
        self.has_node = False

    def _run(self, name: str, log: list[str], num_turns: int, waits: bool) -> Generator[None, None, None]:
        try:
            if waits:
                self.wait(lambda: self.has_node)
                yield
            for number in range(num_turns):
                log.append(f"{name} {number}")
                yield
        finally:
            log.append(f"{name} ends")


class Changes:
    def __init__(self) -> None:
        self.queue = ChangeQueue()
        self.log: list[str] = []
        self.made: dict[str, Scripted] = {}

    def ask(self, name: str, *, replaces: bool = False) -> Job:
        job = Job(name, replaces=replaces)
        self.queue.ask(job)
        return job

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.queue.take_turn(self._plan)

    def _plan(self, job: ChangeJob) -> Change:
        assert isinstance(job, Job)
        if job.name == "impossible":
            raise ValueError("it cannot be")
        self.made[job.name] = Scripted(job, self.log, waits=job.name.startswith("waiting"))
        return self.made[job.name]


@pytest.fixture
def changes() -> Changes:
    return Changes()


def test_one_after_the_other(changes: Changes) -> None:
    refused = changes.ask("impossible")
    first, second = changes.ask("a"), changes.ask("b")
    changes.turn(10)
    assert changes.log == ["a 0", "a 1", "a ends", "b 0", "b 1", "b ends"]
    assert (first.error, second.error) == ("", "")
    assert refused.error == "it cannot be" and refused.is_usage


def test_others_pass_one_that_waits(changes: Changes) -> None:
    changes.ask("waiting")
    changes.ask("a")
    changes.turn(6)
    assert changes.log == ["a 0", "a 1", "a ends"]
    changes.ask("b")
    changes.turn()
    changes.made["waiting"].has_node = True
    changes.turn(6)
    # It does not begin again in the middle of another.
    assert changes.log[3:] == ["b 0", "b 1", "b ends", "waiting 0", "waiting 1", "waiting ends"]


def test_another_request_of_its_kind_replaces_one_that_waits(changes: Changes) -> None:
    job = changes.ask("waiting")
    changes.turn()
    changes.ask("a", replaces=True)
    changes.turn(4)
    assert changes.log == ["waiting ends", "a 0", "a 1", "a ends"]
    assert "another change" in job.error


def test_an_impossible_request_replaces_none(changes: Changes) -> None:
    job = changes.ask("waiting")
    changes.turn()
    refused = changes.ask("impossible", replaces=True)
    changes.turn(4)
    assert refused.is_usage and not job.error
    changes.made["waiting"].has_node = True
    changes.turn(3)
    assert changes.log == ["waiting 0", "waiting 1", "waiting ends"]


def test_urgent_changes_run_beside_others_and_before_later_ones(changes: Changes) -> None:
    changes.ask("a")
    changes.turn()
    changes.queue.begin(Scripted(Job("urgent"), changes.log, num_turns=4))
    changes.ask("b")
    changes.turn(10)
    assert changes.log[:4] == ["a 0", "urgent 0", "a 1", "urgent 1"]
    assert changes.log.index("urgent ends") < changes.log.index("b 0")


def test_all_hear_of_a_stop(changes: Changes) -> None:
    jobs = [changes.ask(name) for name in ("waiting", "a", "b")]
    urgent = Job("urgent")
    changes.turn(2)
    changes.queue.begin(Scripted(urgent, changes.log))
    changes.queue.give_up()
    assert {job.error for job in (*jobs, urgent)} == {"the cluster is stopping"}


def test_an_error_ends_a_change() -> None:
    def steps() -> Generator[None, None, None]:
        yield
        raise ChangeError("no")

    made = Change(Job("a"), steps())
    assert [made.take_turn(), made.take_turn()] == [False, True] and made.job.error == "no"
