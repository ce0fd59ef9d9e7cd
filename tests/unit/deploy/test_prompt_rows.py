"""A run keeps its prompts: their order depends on the number of rows, and their names are places in the file."""

import json

import pytest

from cluster.contracts.errors import ConfigError
from cluster.contracts.prompts_config import PromptsConfig
from cluster.record.run_directory import PASSPORT, RunDirectory
from cluster.rollouts.mixture import Mixture, open_prompts
from deploy.prompt_rows import note_rows, refuse_other_rows


def opened(folder, **names_and_answers: list[str]) -> Mixture:
    """A source a name, with a row for each answer."""
    sources = {}
    for name, answers in names_and_answers.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": "1+1=", "answer": each}) + "\n" for each in answers))
        sources[name] = {"name": "file", "path": str(path)}
    prompts = sources["only"] if [*sources] == ["only"] else {"sources": sources}
    return open_prompts(PromptsConfig.model_validate(prompts), field="prompts")


def begun(folder, mixture: Mixture) -> RunDirectory:
    """A run directory with the passport of a run that began with these prompts."""
    run_dir = RunDirectory(str(folder / "run"))
    run_dir.make()
    prompts = {"sources": {each.name: {} for each in mixture.sources if each.name}}
    note_rows(prompts, mixture)
    run_dir.write_json(PASSPORT, {"mathematics": {"prompts": prompts}})
    return run_dir


def test_equal_rows_are_not_refused(tmp_path):
    run_dir = begun(tmp_path, opened(tmp_path, only=["2", "two"]))
    refuse_other_rows(run_dir, opened(tmp_path, only=["2", "two"]))


@pytest.mark.parametrize(("now", "number"), [(["2", "two", "ii"], 3), (["2", "3"], 2)])
def test_a_resume_with_other_rows_is_refused(tmp_path, now, number):
    """Seen before: with one row more, a resumed epoch sampled 9 of 100 prompts twice and 9 never."""
    run_dir = begun(tmp_path, opened(tmp_path, only=["2", "two"]))
    with pytest.raises(ConfigError, match=rf"prompts: '.*only.jsonl' has changed .*: 2 rows of .* then, {number} of"):
        refuse_other_rows(run_dir, opened(tmp_path, only=now))


def test_of_several_sources_the_changed_one_is_named(tmp_path):
    run_dir = begun(tmp_path, opened(tmp_path, maths=["2"], words=["two"]))
    with pytest.raises(ConfigError, match=r"prompts.sources.words: '.*words.jsonl' has changed"):
        refuse_other_rows(run_dir, opened(tmp_path, maths=["2"], words=["ii"]))


@pytest.mark.parametrize("passport", [{}, {"mathematics": {"prompts": {"name": "file"}}}])
def test_a_run_whose_passport_does_not_name_the_rows_resumes(tmp_path, passport):
    (tmp_path / PASSPORT).write_text(json.dumps(passport))
    refuse_other_rows(RunDirectory(str(tmp_path)), opened(tmp_path, only=["2"]))
    refuse_other_rows(RunDirectory(str(tmp_path)), opened(tmp_path, maths=["2"], words=["two"]))


def test_a_source_of_another_kind_keeps_its_number_of_prompts(tmp_path):
    """Seen in review: with 57 instead of 100 prompts, a resumed run repeated some of an epoch."""
    gym = {"name": "reasoning_gym", "task": "chain_sum"}
    before, now = (
        open_prompts(PromptsConfig.model_validate({**gym, "size": size}), field="prompts") for size in (100, 57)
    )
    run_dir = begun(tmp_path, before)
    refuse_other_rows(run_dir, before)
    with pytest.raises(ConfigError, match="prompts: another number of prompts than when this run began: 100 then, 57"):
        refuse_other_rows(run_dir, now)
