"""Two sources with long, repeated and solved prompts: a run that was killed samples the prompts of one that was not, bit for bit."""

import json

import pytest

from tests.integration.faults import Run, until, write_run
from tests.models import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.acceptance, pytest.mark.timeout(1800)]
STEPS = range(1, 9)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    sums = [{"prompt": f"{number} + 1 ="} for number in range(8)] + [{"prompt": "0 + 1 ="}] * 4
    long = [{"prompt": f"say {letter} " + "again " * (10 * (letter in "xyz"))} for letter in "abcdxyz"]
    sources = {}
    for name, rows, weight in (("sums", sums, 2), ("chat", long, 1)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        sources[name] = {"name": "file", "path": str(folder / f"{name}.jsonl"), "text_as": "text", "weight": weight}
    return write_run(
        folder,
        make_tiny_model(folder / "model"),
        num_steps=len(STEPS),
        buffer={"groups_per_step": 6, "trajectories_per_group": 4},
        prompts={
            "sources": sources,
            "max_prompt_tokens": 20,
            "on_long_prompt": "drop",
            "deduplicate": True,
            "difficulty": {"target": 0.5, "skip_solved_steps": 3, "success_at": 0.12},
        },
        algorithm={},
    )


@pytest.fixture(scope="module")
def undisturbed(file) -> Run:
    return Run(file.parent / "run").to_end(file)


@pytest.fixture(scope="module")
def resumed(file) -> Run:
    run = Run(file.parent / "resumed")
    with run.start(file) as driver:
        until(lambda: run.num_steps() == run.num_recorded() >= 2, process=driver)  # it samples
        run.kill_driver()
    return run.to_end(file)


def prompts(run: Run) -> list[list[tuple[str, str]]]:
    """Ids of each step's groups and prompts, in the order consumed."""
    tables = run.trajectories()
    return [
        list(dict.fromkeys(zip(*tables[step].select(["group_id", "prompt_id"]).to_pydict().values(), strict=True)))
        for step in STEPS
    ]


def ledger(run: Run) -> list[dict]:
    return [json.loads(line) for line in run.directory.read_lines("ledger/ledger.jsonl")]


def test_shares_hold_in_every_step_and_no_long_or_repeated_prompt_is_sampled(undisturbed):
    for step in prompts(undisturbed):
        names = [prompt_id.split("/")[0] for _, prompt_id in step]
        assert names.count("sums") == 4 and names.count("chat") == 2
    sampled = {prompt_id for step in prompts(undisturbed) for _, prompt_id in step}
    assert {int(each.rpartition("/")[2]) for each in sampled if each.startswith("sums")} <= set(range(8))
    assert {int(each.rpartition("/")[2]) for each in sampled if each.startswith("chat")} <= set(range(4))
    numbers = [*undisturbed.metrics().values()]
    assert all(each["prompts/num_groups/sums"] == 4 and "reward/mean/chat" in each for each in numbers)
    assert sum(each.get("prompts/num_dropped", 0) for each in numbers) > 0


def test_solved_prompts_rest(undisturbed):
    sizes, solved, num_rested = {"sums": 8, "chat": 4}, {}, 0
    for record, step in zip(ledger(undisturbed), prompts(undisturbed), strict=True):
        resting = {prompt_id for prompt_id, at in solved.items() if record["step"] - 1 - at < 3}
        for _, prompt_id in step:
            source = prompt_id.split("/")[0]
            of_source = {each for each in resting if each.startswith(source)}
            assert prompt_id not in resting or len(of_source) == sizes[source], "where all rest the epoch goes on"
        num_rested += len(resting)
        rates = record["pass_rates"]
        assert rates.keys() == {prompt_id for _, prompt_id in step}
        unsolved = {prompt_id: at for prompt_id, at in solved.items() if prompt_id not in rates}
        solved = unsolved | {prompt_id: record["step"] for prompt_id, rate in rates.items() if rate == 1}
    assert num_rested, "the test tests something"
    assert sum(each.get("prompts/num_skipped", 0) for each in undisturbed.metrics().values()) > 0


def test_a_killed_run_goes_on_with_the_prompts_that_it_would_have_had(undisturbed, resumed):
    assert resumed.events("resumed")[0]["recorded_steps"] in range(2, 8)
    assert prompts(resumed) == prompts(undisturbed)
    known = [[(record["groups"], record["pass_rates"]) for record in ledger(run)] for run in (undisturbed, resumed)]
    assert known[0] == known[1]
    assert [resumed.weights()[step] for step in STEPS] == [undisturbed.weights()[step] for step in STEPS]
    assert resumed.problems() == () == undisturbed.problems()
