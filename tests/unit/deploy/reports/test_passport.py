"""The marks of the configuration decide what the passport calls mathematics."""

import hashlib
import json
import math

from cluster.contracts.hiding import HIDDEN
from cluster.record.resume_rules import rows_named
from cluster.record.run_directory import PASSPORT, RunDirectory
from cluster.rollouts.mixture import open_prompts
from deploy.config.loading import validated
from deploy.reports.passport import write_passport
from deploy.reports.run_info import passport_differences
from tests.models import make_tiny_model


def written(folder, *overrides: str) -> str:
    config = validated({"model": {"path": "some/model"}, "prompts": {"name": "file", "path": "a.jsonl"}}, overrides)
    write_passport(
        RunDirectory(str(folder)),
        config,
        formula={"advantage": {"name": "grpo"}},
        learner={"attention": "sdpa"},
        weights_digest="d",
    )
    return str(folder)


def test_prompts_are_mathematics_and_deadlines_are_not(tmp_path):
    left = written(tmp_path / "a")
    right = written(tmp_path / "b", "reward.timeout_s=1", "prompts.path=b.jsonl", "rollout.num_workers=2")
    assert passport_differences(left, right) == {"mathematics.prompts.path": ("a.jsonl", "b.jsonl")}


def test_equal_rows_of_two_runs_are_equal_mathematics(tmp_path):
    """Seen in review: the folder of the rows was mathematics, so runs on equal rows always differed."""
    names = rows_named(b"1"), rows_named(b"1"), rows_named(b"2")
    runs = [
        written(tmp_path / run, f"prompts.path={tmp_path / run / name}") for run, name in zip("abc", names, strict=True)
    ]
    assert passport_differences(*runs[:2]) == {}
    assert passport_differences(*runs[1:]) == {"mathematics.prompts.path": names[1:]}


def test_other_rows_of_the_same_file_are_other_mathematics(tmp_path):
    path = tmp_path / "a.jsonl"
    for number, run in enumerate("ab", start=1):
        path.write_text('{"prompt": "1+1="}\n' * number)
        config = validated({"model": {"path": "m"}, "prompts": {"name": "file", "path": str(path)}})
        prompts = open_prompts(config.prompts, field="prompts")
        directory = RunDirectory(str(tmp_path / run))
        write_passport(directory, config, formula={}, learner={}, weights_digest="d", prompts=prompts)
    found = passport_differences(str(tmp_path / "a"), str(tmp_path / "b"))
    assert found["mathematics.prompts.num_rows"] == (1, 2)
    assert found.keys() == {"mathematics.prompts.num_rows", "mathematics.prompts.rows_digest"}


def test_a_judge_has_the_parameters_that_are_left_at_their_defaults_too(tmp_path):
    """Seen before: two spellings of one judge were other mathematics, and a default that a version changed was not."""
    left = written(tmp_path / "a", "algorithm.sft.prompts={name: file, path: b.jsonl}")
    right = written(tmp_path / "b", "reward.judge={name: exact_match, column: answer}", "prompts.text_as=auto",
                    "algorithm.sft.prompts={name: file, path: b.jsonl, text_as: auto}")  # fmt: skip
    assert passport_differences(left, right) == {}
    mathematics = RunDirectory(left).read_json(PASSPORT)["mathematics"]
    assert mathematics["reward"]["judge"] == {"name": "exact_match", "column": "answer", "ignore_case": False}
    assert mathematics["environment"] == {"name": "single_turn"}
    assert mathematics["prompts"]["text_as"] == mathematics["sft"]["prompts"]["text_as"] == "auto"


def judged(*, completion: str, columns: dict, scale: object = object(), words: tuple[str, ...] = ("a",)) -> float:
    return 0.0


def test_a_default_that_json_does_not_know_is_told_by_its_type(tmp_path):
    folder = written(tmp_path, f"reward.judge={__name__}:judged")
    judge = RunDirectory(folder).read_json(PASSPORT)["mathematics"]["reward"]["judge"]
    assert judge == {"name": f"{__name__}:judged", "scale": "builtins.object", "words": ["a"]}


def test_the_number_of_steps_is_mathematics_where_a_schedule_ends_with_the_run(tmp_path):
    constant = [written(tmp_path / str(steps), f"num_steps={steps}") for steps in (10, 20)]
    assert passport_differences(*constant) == {}
    linear = "optimizer.schedule=linear"
    ending = [written(tmp_path / f"linear-{steps}", f"num_steps={steps}", linear) for steps in (10, 20)]
    assert passport_differences(*ending) == {"mathematics.num_steps": (10, 20)}


def test_a_secret_of_the_mathematics_is_hidden(tmp_path):
    folder = written(tmp_path, "reward.judge={name: mine, api_key: k-1}")
    judge = json.loads(RunDirectory(folder).read_text(PASSPORT))["mathematics"]["reward"]["judge"]
    assert judge == {"name": "mine", "api_key": HIDDEN}


def test_a_secret_of_a_function_of_ones_own_is_hidden_too(tmp_path):
    """Seen before: `run.yaml` hid it, and the passport, which runs are compared by and trackers get, did not."""
    config = validated({"model": {"path": "some/model"}, "prompts": "file"})
    shaping = {"name": "mine:shaped", "parameters": {"api_key": "k-1"}}
    write_passport(RunDirectory(str(tmp_path)), config, formula={"shaping": shaping}, learner={}, weights_digest="d")
    assert "k-1" not in (tmp_path / PASSPORT).read_text()


def test_an_infinite_parameter_is_a_word_that_every_reader_of_json_knows(tmp_path):
    config = validated({"model": {"path": "some/model"}, "prompts": "file"})
    parameters = {"low": -math.inf, "high": 2.0}
    run_dir = RunDirectory(str(tmp_path / "new"))
    write_passport(run_dir, config, formula={"corrections": [parameters]}, learner={}, weights_digest="d")
    text = run_dir.read_text(PASSPORT)
    assert json.loads(text)["mathematics"]["corrections"] == [{"low": "-inf", "high": 2.0}] and "Infinity" not in text
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / PASSPORT).write_text(text.replace('"-inf"', "-Infinity"))
    assert passport_differences(str(tmp_path / "old"), run_dir.url) == {}


def test_a_reference_of_another_content_under_the_same_path_is_other_mathematics(tmp_path):
    runs = [tmp_path / "a", tmp_path / "b"]
    for seed, folder in enumerate(runs):
        make_tiny_model(tmp_path / "teacher", seed=seed)
        written(folder, f"reference.path={tmp_path / 'teacher'}")
    assert list(passport_differences(*map(str, runs))) == ["mathematics.reference.fingerprints.path"]


def test_a_judge_of_another_content_under_the_same_paths_is_other_mathematics(tmp_path):
    runs = [tmp_path / "a", tmp_path / "b"]
    judge = {"name": "llm_judge", "server": "grader", "rubric": str(tmp_path / "rubric.yaml")}
    for seed, folder in enumerate(runs):
        make_tiny_model(tmp_path / "grader", seed=seed)
        (tmp_path / "rubric.yaml").write_text(f"criteria {seed}")
        written(
            folder, f"reward={json.dumps({'judge': judge, 'servers': {'grader': {'path': str(tmp_path / 'grader')}}})}"
        )
    assert sorted(passport_differences(*map(str, runs))) == [
        "mathematics.reward.rubric_digests.judge",
        "mathematics.reward.servers.grader.fingerprint",
    ]


def test_the_code_of_a_users_own_function_counts(tmp_path, monkeypatch):
    """Seen in review: two runs with different judges of one name had equal passports."""
    monkeypatch.syspath_prepend(tmp_path)
    digests = []
    for run, body in (("a", "1.0"), ("b", "2.0")):
        (tmp_path / f"judge_of_{run}.py").write_text(f"def judge(*, completion: str) -> float:\n    return {body}\n")
        written(tmp_path / run, f"reward.judge=judge_of_{run}:judge")
        (code,) = json.loads((tmp_path / run / PASSPORT).read_text())["files"]["code"].values()
        digests.append(code)
    assert digests == [hashlib.sha256((tmp_path / f"judge_of_{run}.py").read_bytes()).hexdigest() for run in "ab"]


def test_each_of_several_sources_may_be_a_users_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_prompts.py").write_text("def of_sums(): ...\n")
    sources = {"maths": "my_prompts:of_sums", "words": {"name": "file", "path": "b.jsonl"}}
    config = validated({"model": {"path": "m"}, "prompts": {"sources": sources}})
    write_passport(RunDirectory(str(tmp_path)), config, formula={}, learner={}, weights_digest="d")
    assert json.loads((tmp_path / PASSPORT).read_text())["files"]["code"].keys() == {"my_prompts:of_sums"}
