"""`--wait-for-claim`: a driver waits for another one's end, and goes on waiting when a third was faster."""

import pytest
import yaml

from cluster.contracts.errors import InUseError
from cluster.record.run_directory import RunDirectory
from deploy.claims import once_free

CONFIG = yaml.safe_dump({"seed": 1})


class Clock:
    """Sleeping passes the time; `at` makes calls at times."""

    def __init__(self, **at) -> None:
        self.time_s = 0.0
        self.at = {float(name[1:]): call for name, call in at.items()}

    def __call__(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds
        for due in [each for each in self.at if each <= self.time_s]:
            self.at.pop(due)()


@pytest.fixture
def owner(tmp_path):
    owner = RunDirectory(str(tmp_path))
    owner.claim(CONFIG)
    yield owner
    owner.release()


def claimed(owner: RunDirectory) -> str:
    directory = RunDirectory(owner.url)
    directory.claim(CONFIG)
    directory.release()
    return "trained"


def test_it_begins_when_the_owner_ends_and_says_who_that_was(owner, capsys):
    clock = Clock(_100=owner.release)
    assert once_free(owner.url, lambda: claimed(owner), wait_s=600, clock=clock, sleep=clock.sleep) == "trained"
    assert clock.time_s == 100
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "is in use by process" in said[0] and "waits up to 600 s for it" in said[0]


def test_it_gives_up_in_the_end(owner):
    clock = Clock()
    with pytest.raises(InUseError, match="is in use by process"):
        once_free(owner.url, lambda: claimed(owner), wait_s=30, clock=clock, sleep=clock.sleep)
    assert clock.time_s == 30


def test_without_a_wait_it_is_refused_at_once(owner):
    with pytest.raises(InUseError):
        once_free(owner.url, lambda: claimed(owner), wait_s=0, sleep=pytest.fail)


def test_one_that_comes_second_goes_on_waiting(owner):
    clock = Clock(_10=owner.release, _50=lambda: third.release())
    third = RunDirectory(owner.url)
    attempts = []

    def work() -> str:
        attempts.append(clock.time_s)
        if len(attempts) == 1:
            third.claim(CONFIG)
        return claimed(owner)

    assert once_free(owner.url, work, wait_s=600, clock=clock, sleep=clock.sleep) == "trained"
    assert attempts == [10, 50]
