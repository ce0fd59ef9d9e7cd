"""The ledger refuses to forget, to repeat, and to believe what was altered."""

import json

import pytest

from cluster.contracts.errors import LedgerError
from cluster.record.ledger import NAME, Ledger


class Paper:
    """A journal in memory."""

    def __init__(self, lines=()):
        self.lines = list(lines)

    def append_line(self, name, line):
        assert name == NAME
        self.lines.append(line)

    def read_lines(self, name):
        return list(self.lines)

    def replace_lines(self, name, lines):
        self.lines = list(lines)


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
    assert [record.groups for record in ledger.records] == [(0, 1), (2, 4), (5, 6)]
    assert (ledger.version, ledger.next_index, ledger.num_cut) == (3, 7, 0)


def test_after_a_checkpoint_come_the_steps_to_learn_again(paper):
    assert [record.step for record in Ledger(paper).after(1)] == [2, 3]


def test_a_group_is_never_consumed_twice(paper):
    with pytest.raises(LedgerError, match="never twice"):
        write(Ledger(paper), [6, 7])


def test_groups_are_consumed_in_start_order(paper):
    with pytest.raises(LedgerError, match="in order"):
        write(Ledger(paper), [8, 7])


def test_a_torn_tail_is_cut_back_to_the_last_whole_record(paper):
    paper.lines[-1] = paper.lines[-1][:20]
    ledger = Ledger(paper)
    assert (ledger.version, ledger.num_cut, len(paper.lines)) == (2, 1, 2)
    assert write(ledger, [5, 6]).step == 3


def test_an_altered_record_is_found_by_its_successor(paper):
    record = json.loads(paper.lines[0])
    paper.lines[0] = json.dumps({**record, "groups": [0, 9]})
    with pytest.raises(LedgerError, match="line 2: the record before it was altered"):
        Ledger(paper)


def test_a_missing_record_is_found(paper):
    del paper.lines[1]
    with pytest.raises(LedgerError, match="step 3 does not follow step 1"):
        Ledger(paper)


def test_garbage_in_the_middle_is_not_cut_away(paper):
    paper.lines[1] = "garbage"
    with pytest.raises(LedgerError, match="line 2 of 3"):
        Ledger(paper)
