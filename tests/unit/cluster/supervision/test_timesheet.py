"""Where the time of all actors went, on hand-worked phases."""

from dataclasses import dataclass, field

import pytest

from cluster.contracts.phases import CAUSES, Phase
from cluster.contracts.types import ActorKind
from cluster.remote.actor import ActorSpec
from cluster.supervision import timesheet
from cluster.supervision.timesheet import Timesheet, awaited


@dataclass
class Actor:
    name: str
    kind: ActorKind = ActorKind.ROLLOUT_WORKER
    num_gpus: float = 0.0
    told: list[Phase] = field(default_factory=list)

    @property
    def spec(self) -> ActorSpec:
        return ActorSpec(name=self.name, kind=self.kind, factory="f:f", arguments={}, num_gpus=self.num_gpus)

    def did(self, *phases: tuple[str, float, float]) -> "Actor":
        self.told += [Phase(name=name, start=start, end=end) for name, start, end in phases]
        return self

    def drain_phases(self) -> list[Phase]:
        drained, self.told = self.told, []
        return drained


class Sheet(Timesheet):
    """Its clock stands at `at`, its lines are listed."""

    def __init__(self) -> None:
        self.lines: list[dict] = []
        self.at = 100.0
        super().__init__(self.lines.extend, now=lambda: self.at)

    def of(self, actor: str) -> list[tuple[str, float, float]]:
        return [(each["phase"], each["start"], each["end"]) for each in self.lines if each["actor"] == actor]


@pytest.fixture
def sheet() -> Sheet:
    return Sheet()


def test_a_wait_is_cut_by_what_the_driver_and_the_groups_were_at(sheet):
    for at, stage, *works in (
        (100.0, "waiting for rollouts", "sampling"),
        (104.0, "waiting for rollouts", "judging"),
        (105.0, "learning"),
        (107.0, "sending weights"),
        (108.0, "waiting for rollouts", "fetching"),
    ):
        sheet.at = at
        sheet.enter(stage)
        sheet.note_work(*works)
    sheet.at = 110.0
    sheet.hear([Actor("rollout-0").did(("sampling", 100, 103), ("idle", 103, 110))])
    sheet.close()
    assert sheet.of("rollout-0") == [
        ("sampling", 100, 103),
        ("waiting for rollouts", 103, 104),
        ("waiting for rewards", 104, 105),
        ("waiting for learner", 105, 107),
        ("waiting for weights", 107, 108),
        ("waiting for prompts", 108, 110),
    ]
    assert sheet.of("controller") == [
        ("waiting for rollouts", 100, 105),
        ("learning", 105, 107),
        ("sending weights", 107, 108),
        ("waiting for rollouts", 108, 110),
    ]


@pytest.mark.parametrize(
    ("kind", "stage", "works", "cause"),
    [
        ("learner", "waiting for rollouts", ["sampling", "judging"], "rollouts"),
        ("learner", "waiting for rollouts", ["judging"], "rewards"),
        ("learner", "evaluation", [""], "rollouts"),
        ("learner", "sending weights", ["sampling"], "weights"),
        ("rollout_worker", "learning", ["sampling"], "learner"),
        ("rollout_worker", "learning", ["sampling", "fetching"], "prompts"),
        ("reward_service", "learning", ["sampling"], "rollouts"),
        ("reward_service", "learning", [""], "learner"),
        ("reference_scorer", "waiting for rollouts", ["judging"], "rewards"),
        ("reward_service", "starting", [""], "start"),
    ],
)
def test_what_an_actor_waits_for_depends_on_where_it_stands_in_the_loop(kind, stage, works, cause):
    assert awaited(ActorKind(kind), stage=stage, works=works) == cause
    assert Phase(name=f"waiting for {cause}", start=0, end=1).cause in CAUSES


def test_the_causes_of_an_actor_sum_to_its_wall_clock_over_a_restart(sheet):
    """GPU seconds: the learner's 2 GPUs for 10 s and 20 s, and the worker's one for 10 s and 16 s; it had none for the 4 s of a restart."""
    first, gpu = Actor("rollout-0", num_gpus=1.0), Actor("learner-0", ActorKind.LEARNER, num_gpus=2.0)
    sheet.hear([first.did(("starting", 100, 103), ("sampling", 103, 110)), gpu.did(("learning", 100, 110))])
    assert sheet.drain_stats() == {
        "cost/learner/busy_s": 10.0,
        "cost/rollout_worker/busy_s": 7.0,
        "cost/rollout_worker/restart_s": 3.0,
        "cost/gpu_hours": (20 + 10) / 3600,
        "cost/idle_gpu_hours": 3 / 3600,
    }
    sheet.hear([first.did(("sampling", 110, 111)), gpu])
    replacement = Actor("rollout-0", num_gpus=1.0)
    replacement.did(("starting", 115, 118), ("loading weights", 118, 119), ("sampling", 119, 130))
    sheet.hear([replacement, gpu.did(("waiting", 110, 130))])
    spent = sheet.drain_stats()
    assert spent["cost/rollout_worker/restart_s"] == 4 + 3
    assert spent["cost/rollout_worker/weights_s"] == 1
    assert sum(seconds for name, seconds in spent.items() if name.startswith("cost/rollout_worker/")) == 20
    assert spent["cost/learner/busy_s"] == 0.0, "a cause that came up before is said to be nought"
    assert spent["cost/gpu_hours"] == (40 + 16) / 3600
    assert spent["cost/idle_gpu_hours"] == (40 + 3 + 1) / 3600
    sheet.close()
    assert ("restarting", 111, 115) in sheet.of("rollout-0")


def test_the_drivers_phases_name_their_step_and_the_last_one_is_written_in_the_end(sheet):
    sheet.enter("learning", step=3)
    sheet.at = 105.0
    sheet.enter("saving")
    sheet.at = 107.0
    sheet.close()
    learning, saving = sheet.lines
    assert learning == {"actor": "controller", "phase": "learning", "start": 100.0, "end": 105.0, "step": 3}
    assert saving == {"actor": "controller", "phase": "saving", "start": 105.0, "end": 107.0}


def test_a_phase_that_goes_on_is_one_line_in_the_end_and_a_long_one_is_written_in_parts(sheet):
    worker = Actor("rollout-0")
    for second in range(100, 230, 10):
        sheet.hear([worker.did(("sampling", second, second + 10))])
    assert sheet.of("rollout-0") == [("sampling", 100, 170)]
    sheet.close()
    assert sheet.of("rollout-0") == [("sampling", 100, 170), ("sampling", 170, 230)]


def test_many_short_phases_are_few_lines_of_the_same_stretch_and_are_counted_exactly(sheet):
    moments = [100 + number / 10 for number in range(501)]
    names = ["sampling", "idle"] * 250
    worker = Actor("rollout-0").did(*zip(names, moments, moments[1:], strict=False))
    sheet.enter("waiting for rollouts")
    sheet.hear([worker, *(Actor(f"rollout-{number}") for number in range(1, 16))])
    sheet.close()
    lines = sheet.of("rollout-0")
    assert len(lines) <= 6 and (lines[0][1], lines[-1][2]) == (100, 150)
    spent = sheet.drain_stats()
    assert spent["cost/rollout_worker/busy_s"] == pytest.approx(25)
    assert spent["cost/rollout_worker/rollouts_s"] == pytest.approx(25)


def test_what_costs_nothing_and_what_is_not_known_are_not_counted(sheet):
    server = Actor("server-judge-0", ActorKind.JUDGE_SERVER, num_gpus=1).did(("serving", 100, 101))
    sheet.hear([Actor("recorder", ActorKind.RECORDER).did(("record", 100, 101)), server])
    sheet.close()
    assert sheet.of("server-judge-0") == [("serving", 100, 101)], "and not that it waits"
    assert sheet.drain_stats() == {"cost/gpu_hours": 0.0, "cost/idle_gpu_hours": 0.0}
    assert sheet.of("recorder") == [("record", 100, 101)]


def test_of_workers_that_left_in_weeks_the_last_are_known(sheet, monkeypatch):
    """Seen in review: each worker that took the place of one on a spot node stayed, and each heartbeat looked at all of them."""
    monkeypatch.setattr(timesheet, "_MOST_ABSENT", 2)
    for number in range(5):
        sheet.hear([Actor(f"rollout-{number}").did(("sampling", 100 + number, 101 + number))])
        assert number == 0 or sheet.of(f"rollout-{number - 1}") == [("sampling", 99 + number, 100 + number)]
    assert [*sheet._unwritten] == ["rollout-2", "rollout-3", "rollout-4"]


def test_what_a_worker_did_last_is_written_when_it_has_left(sheet):
    """Seen before: it waited for the end of the run, and a killed driver never wrote it."""
    worker, other = Actor("rollout-0"), Actor("rollout-1")
    sheet.hear([worker.did(("sampling", 100, 105)), other.did(("sampling", 100, 105))])
    sheet.hear([other.did(("sampling", 105, 110))])
    assert sheet.of("rollout-0") == [("sampling", 100, 105)] and sheet.of("rollout-1") == []
    sheet.hear([worker.did(("starting", 120, 130)), other])
    sheet.close()
    assert sheet.of("rollout-0") == [("sampling", 100, 105), ("restarting", 105, 120), ("starting", 120, 130)]
    assert sheet.of("rollout-1") == [("sampling", 100, 110)]
