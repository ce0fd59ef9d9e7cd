"""Numbers that follow from a configuration."""

from unittest.mock import AsyncMock, Mock

import pytest

from cluster.contracts.errors import DataError
from cluster.contracts.provenance import unknown
from cluster.contracts.types import Group
from cluster.record.ledger import Ledger
from cluster.record.run_directory import RunDirectory
from deploy.cluster_up.wiring import judging_deadline_s, wanting_reference, wire
from deploy.config.loading import validated
from deploy.launch import make_buffer, ticket_office
from learner.algorithms.objective import Objective
from tests.fakes import ListedEvents, actor_spec, group_summary


def test_judging_may_take_as_long_as_all_that_may_be_queued_before_it_an_evaluation_and_an_outage_included():
    """16 trajectories of a step at 30 s, an outage of 100 s and a minute; 512 held-out completions at 30 s beside them."""
    settings = {
        "model": {"path": "m"},
        "prompts": "file",
        "buffer": {"groups_per_step": 4, "trajectories_per_group": 4},
        "reward": {"timeout_s": 30.0, "hold_s": 100.0},
    }
    assert judging_deadline_s(validated(settings)) == 640.0
    assert validated(settings).stall_s - validated({**settings, "reward": {"hold_s": 0.0}}).stall_s == 100.0
    held_out = {"prompts": "file", "num_prompts": 256, "num_samples": 2, "temperature": 1.0}
    assert judging_deadline_s(validated({**settings, "evaluation": held_out})) == 16_000.0


@pytest.mark.parametrize(
    ("algorithm", "scored"),
    [
        ({"monitor": {"reference_kl": 3}}, [0, 1, 6, 7]),
        ({"kl": {"loss": {"coefficient": 0.1}}}, [*range(10)]),
        ({}, []),
    ],
)
def test_the_reference_scores_the_groups_of_every_third_step_or_of_all(algorithm, scored):
    buffer = {"groups_per_step": 2}
    config = validated({"model": {"path": "m"}, "prompts": "file", "buffer": buffer, "algorithm": algorithm})
    wants = wanting_reference(config, Objective.of_run(config))
    assert [index for index in range(10) if wants(index)] == scored


async def test_what_a_judged_group_shows_of_its_prompt_comes_into_the_record_of_its_step(tmp_path):
    """And a group that a filter drops as well: group 0 is solved, group 1 is half solved."""
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n')
    settings = {
        "model": {"path": "m"},
        "prompts": {"name": "file", "path": str(tmp_path / "sums.jsonl"), "difficulty": {"target": 0.5}},
        "buffer": {"groups_per_step": 2, "trajectories_per_group": 2},
        "algorithm": {"filters": ["zero_variance"]},
        "elastic": {"wait_for_nodes_s": 60},
    }
    config, run_dir = validated(settings), RunDirectory(str(tmp_path / "run"))
    ledger = Ledger(run_dir)
    office = ticket_office(config, ledger)
    specs = Mock(
        **{
            "rollout_workers.return_value": [actor_spec("rollout-0")],
            "reward_services.return_value": [actor_spec("reward")],
            "reward_models.return_value": {},
            "judge_servers.return_value": {},
            "reference_scorer.return_value": None,
            "learner_ranks.return_value": [actor_spec("learner-0")],
        }
    )
    made = wire(
        config,
        seats=Mock(),
        specs=specs,
        run_dir=run_dir,
        ledger=ledger,
        verdicts=Mock(),
        log=ListedEvents(),
        tasks=Mock(),
        office=office,
        provenance=unknown,
    )
    assert made.production.waits_for_nodes(), "as the run file says"
    buffer = make_buffer(config)
    destination = made.production._destination(buffer)
    tickets = await office.tickets(buffer.start(), policy_version=0)
    for ticket, rewards in zip(tickets, ((1.0, 1.0), (1.0, 0.0)), strict=True):
        summary = group_summary(ticket.index, rewards=rewards, prompt_id=ticket.prompt.prompt_id)
        await destination.add(ticket, Group(pieces=(), summary=summary))
    assert not buffer.is_live(0) and buffer.is_live(1)
    made.learner._recorder.call_for_batches = AsyncMock(return_value=(["groups"], ("step 1", "digest")))
    made.learner._learn = AsyncMock(side_effect=DataError("no rank"))
    with pytest.raises(DataError):
        await made.learner.update([(1, Group(pieces=(), summary=summary))])
    (record,) = ledger.records()
    assert record.pass_rates == {tickets[0].prompt.prompt_id: 1.0, tickets[1].prompt.prompt_id: 0.5}
    later = [each.prompt.prompt_id for each in await office.tickets(range(2, 12), policy_version=1)]
    assert set(later) == {tickets[1].prompt.prompt_id}, "the solved prompt rests for ten steps"
    resumed = await ticket_office(config, Ledger(run_dir)).tickets(range(2, 12), policy_version=1)
    assert [each.prompt.prompt_id for each in resumed] == later
    office.close()
