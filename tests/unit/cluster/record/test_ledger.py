"""The ledger refuses to forget, to repeat, and to believe what was altered."""

import json

import pytest

from cluster.contracts.errors import LedgerError, StorageError
from cluster.record.ledger import Ledger, Record, checked


class Paper:
    """A journal in memory."""

    def __init__(self, lines=()):
        self.lines = list(lines)

    def append_record(self, step, line):
        assert step == len(self.lines) + 1
        self.lines.append(line)

    def read_records(self, after=0):
        return self.lines[after:]

    def cut_records(self, number):
        del self.lines[number:]


def write(ledger, groups):
    return ledger.append(groups=groups, trajectories=f"{groups}", trajectories_digest="d")


@pytest.fixture
def paper():
    paper = Paper()
    ledger = Ledger(paper)
    for groups in ([0, 1], [2, 4], [5, 6]):  # 3 was dropped
        write(ledger, groups)
    return paper


def test_it_reads_back_what_it_wrote(paper):
    ledger = Ledger(paper)
    assert [record.groups for record in ledger.records()] == [(0, 1), (2, 4), (5, 6)]
    assert (ledger.version, ledger.next_index, ledger.num_torn_lines) == (3, 7, 0)


def test_after_a_checkpoint_come_the_steps_to_learn_again(paper):
    assert [record.step for record in Ledger(paper).after(1)] == [2, 3]


def test_it_keeps_no_more_than_the_last_record(paper):
    ledger = Ledger(paper)
    write(ledger, [7])
    kept = [value for value in vars(ledger).values() if isinstance(value, Record | list | tuple | dict)]
    assert [record.step for record in kept] == [4]
    assert [record.step for record in ledger.after(2)] == [3, 4]


def test_a_replay_sees_only_the_steps_it_learns_again(paper):
    ledger = Ledger(paper, num_steps=2)
    assert [record.step for record in ledger.after(0)] == [record.step for record in ledger.records()] == [1, 2]


def test_a_group_is_never_consumed_twice(paper):
    with pytest.raises(LedgerError, match="never twice"):
        write(Ledger(paper), [6, 7])


def test_groups_are_consumed_in_start_order(paper):
    for groups in ([8, 7], [7, 7], []):
        with pytest.raises(LedgerError, match="in order"):
            write(Ledger(paper), groups)


def test_a_group_that_two_records_consume_is_found_though_their_digests_match(paper):
    third = Record.model_validate_json(paper.lines[2])
    paper.lines[2] = third.model_copy(update={"groups": (4, 6)}).line
    with pytest.raises(LedgerError, match="line 3: group 4 was consumed before"):
        Ledger(paper)


@pytest.mark.parametrize("changed", [{"groups": (5, 5)}, {"groups": (6, 5)}, {"next_index": 6}])
def test_a_last_record_that_lets_a_group_be_consumed_twice_is_found(paper, changed):
    paper.lines[2] = Record.model_validate_json(paper.lines[2]).model_copy(update=changed).line
    with pytest.raises(LedgerError, match=r"line 3: groups \[\d, \d\] are not in start order, each once, below"):
        Ledger(paper)


def test_lines_that_come_later_are_checked_against_the_record_before_them(paper):
    before = Record.model_validate_json(paper.lines[0])
    assert [record.step for record in checked(paper.lines[1:], before=before)] == [2, 3]
    with pytest.raises(LedgerError, match="line 2 of 3 is not a record"):
        list(checked(["garbage", paper.lines[2]], before=before))


def test_a_record_takes_the_place_of_a_torn_last_line(paper):
    paper.lines[-1] = paper.lines[-1][:20]
    ledger = Ledger(paper)
    assert (ledger.version, ledger.num_torn_lines, len(paper.lines)) == (2, 1, 3)
    assert [record.step for record in ledger.after(1)] == [2]
    assert write(ledger, [5, 6]).step == 3 and ledger.num_torn_lines == 0
    assert [record.groups for record in Ledger(paper).records()] == [(0, 1), (2, 4), (5, 6)]


@pytest.mark.parametrize(("field", "says"), [({"learner": 7}, "learner: Extra inputs"), ({"groups": []}, "groups: ")])
def test_a_last_record_of_another_version_is_not_torn(paper, field, says):
    """Seen before: it was taken for one that a crash had torn, and the next step took its place."""
    paper.lines[-1] = json.dumps(json.loads(paper.lines[-1]) | field)
    with pytest.raises(
        LedgerError, match=rf"line 3 is not a record of this version of treadwheel \({says}.*; go on with"
    ):
        Ledger(paper)


def test_an_altered_record_is_found_by_its_successor(paper):
    record = json.loads(paper.lines[0])
    paper.lines[0] = json.dumps({**record, "trajectories_digest": "e"})
    with pytest.raises(LedgerError, match="line 2: the record before it was altered"):
        Ledger(paper)


def test_the_first_record_follows_no_other(paper):
    paper.lines = [Record.model_validate_json(paper.lines[0]).model_copy(update={"previous": "d"}).line]
    with pytest.raises(LedgerError, match="line 1: the record before it was altered"):
        Ledger(paper)


def test_a_record_that_was_not_written_does_not_count(paper, monkeypatch):
    def full(step, line):
        raise StorageError("disk full")

    ledger = Ledger(paper)
    monkeypatch.setattr(paper, "append_record", full)
    with pytest.raises(StorageError):
        write(ledger, [7])
    assert (ledger.version, ledger.next_index) == (3, 7)


def test_a_missing_record_is_found(paper):
    del paper.lines[1]
    with pytest.raises(LedgerError, match="step 3 does not follow step 1"):
        Ledger(paper)


def test_garbage_in_the_middle_is_not_cut_away(paper):
    paper.lines[1] = "garbage"
    with pytest.raises(LedgerError, match="line 2 of 3"):
        Ledger(paper)
