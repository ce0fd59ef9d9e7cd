import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from cluster.contracts.errors import ConfigError
from cluster.contracts.plugins import (
    ENVIRONMENTS,
    PROMPTS,
    REWARDS,
    SINKS,
    TRANSPORTS,
    Home,
    Plugin,
    find,
    names,
    parameter_names,
    prompt_source,
    resolve,
)

HERE = Home(package=__name__, called_with=("value",))


def scaled(value: float, *, factor: float, clip: float | None = None) -> float:
    return value * factor


def of_every_kind(
    value: float,
    *,
    factor: float,
    clip: float | None = None,
    mode: Literal["soft", "hard"] = "soft",
    words: Sequence[str] = (),
    label: Annotated[str, "shown"] = "",
    bound: Annotated[int, Field(gt=0)] | None = None,
    scales: Sequence[float] | Mapping[str, float] = (),
    switch: bool | float = False,
    free: Any = None,
) -> float:
    return factor


def doubled(value: float) -> float:
    return 2 * value


def anything(**options: object) -> dict[str, object]:
    return options


def without_the_value(*, factor: float) -> float:
    return factor


twice = doubled
NUMBER = 3


def refusal(plugin: Plugin) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(plugin, home=HERE, field="my.field")
    return str(caught.value)


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        ({"factor": "x"}, "a number"),
        ({"factor": 1.0, "clip": "x"}, "a number or null"),
        ({"factor": 1.0, "mode": "x"}, "one of 'soft', 'hard'"),
        ({"factor": 1.0, "words": 5}, "a list"),
        ({"factor": 1.0, "label": 5}, "a text"),
        ({"factor": True}, "a number"),
        ({"factor": 1.0, "clip": False}, "a number or null"),
        ({"factor": 1.0, "bound": True}, "a whole number or null"),
        ({"factor": 1.0, "scales": [1.0, True]}, "a list or a mapping"),
        ({"factor": 1.0, "scales": {"a": True}}, "a list or a mapping"),
    ],
)
def test_what_a_parameter_must_be_is_said_in_words(params, kind):
    assert refusal(Plugin(name=f"{__name__}:of_every_kind", params=params)).endswith(f"; it must be {kind}")


def test_of_a_module_without_a_file_no_parameters_are_known():
    assert parameter_names("os:getcwd", home=HERE) == parameter_names("sys:exit", home=HERE) == ()


def test_short_and_long_forms_mean_the_same():
    assert Plugin.model_validate("grpo") == Plugin.model_validate({"name": "grpo"}) == Plugin(name="grpo")
    assert Plugin.model_validate({"name": "a", "factor": 2}) == Plugin(name="a", params={"factor": 2})
    assert Plugin(name="a", params={"factor": 2}).model_dump() == {"name": "a", "factor": 2}
    assert Plugin(name="a").model_dump() == "a"


def test_parameters_are_bound_and_converted():
    bound = resolve(Plugin(name="scaled", params={"factor": "2"}), home=HERE, field="my.field")
    assert bound(3.0) == 6.0


def test_true_and_false_are_no_numbers_unless_the_parameter_takes_both():
    told = refusal(Plugin(name="scaled", params={"factor": True}))
    assert told == "my.field.factor=True is not valid: Input should be a valid number; it must be a number"
    given = {"factor": 1.0, "switch": True, "free": [True]}
    bound = resolve(Plugin(name=f"{__name__}:of_every_kind", params=given), home=HERE, field="my.field")
    assert bound.keywords["switch"] is True and bound.keywords["free"] == [True]


def test_a_full_path_needs_no_home():
    nowhere = Home(package="nowhere", called_with=("x",))
    assert resolve(Plugin(name="math:sqrt"), home=nowhere, field="my.field").func(4.0) == 2.0


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (Plugin(name="doubld"), "my.field='doubld' is not there; did you mean 'doubled'?"),
        (Plugin(name="absent"), "has: anything, doubled, of_every_kind, scaled, twice; write your own"),
        (
            Plugin(name="no.such:thing"),
            "my.field='no.such:thing' does not import: there is no module 'no'; start the command in the folder of no.py, or name that "
            "folder in PYTHONPATH",
        ),
        (Plugin(name="sys:judge"), "my.field='sys:judge' does not import: sys has no 'judge'; "),
        (
            Plugin(name=f"{__name__}:without_value"),
            f"{__file__} has no 'without_value'; did you mean 'without_the_value'? ",
        ),
        (Plugin(name=f"{__name__}:QQQ"), f"{__file__} has no 'QQQ'; it has: "),
        (Plugin(name="./mine/rewards.py:judge"), "write the module without folder and .py: rewards:judge"),
        (Plugin(name="rewards.py:judge"), "write the module without folder and .py: rewards:judge"),
        (
            Plugin(name="my_rewards.judge"),
            "my.field='my_rewards.judge' is not there; did you mean 'my_rewards:judge'? ",
        ),
        (Plugin(name="scaled"), "my.field='scaled' needs factor; write my.field: {name: scaled, factor: ...}"),
        (Plugin(name="scaled", params={"factor": "wide"}), "my.field.factor='wide' is not valid"),
        (
            Plugin(name="scaled", params={"factor": 1, "speed": 2}),
            "my.field.speed=2 is not a parameter of 'scaled'; it takes: factor, clip",
        ),
        (Plugin(name="scaled", params={"factor": 1, "value": 2}), "my.field.value=2 is not a parameter"),
        (Plugin(name="anything", params={"value": 2}), "my.field.value=2 is not a parameter"),
        (Plugin(name=f"{__name__}:NUMBER"), "is of type int; it must be a function or a class"),
        (Plugin(name="builtins:max"), "my.field='builtins:max' has no signature"),
        (Plugin(name=f"{__name__}:without_the_value"), "does not take value; it is called with value"),
    ],
)
def test_a_mistake_names_field_value_and_way_out(plugin, message):
    assert message in refusal(plugin)


def _asks_elsewhere(value: float, *, api_key: str = "", password: float = 0.0, headers: str = "") -> float:
    return value


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"api_key": 4711},
            "my.field.api_key=<hidden> is not valid: Input should be a valid string; it must be a text",
        ),
        ({"password": "p4711"}, "my.field.password=<hidden> is not valid"),
        ({"headers": {"Authorization": "Basic 4711"}}, "my.field.headers={'Authorization': '<hidden>'} is not valid"),
        ({"headers": {1: "one"}}, "my.field.headers={1: 'one'} is not valid"),
        ({"hf_token": "4711"}, "my.field.hf_token is not a parameter"),
        ({"access_key": "4711"}, "my.field.access_key is not a parameter"),
        ({"header": {"X-Api-Key": "4711"}}, "my.field.header={'X-Api-Key': '<hidden>'} is not a parameter"),
    ],
)
def test_what_may_be_a_secret_is_in_no_error(params, message):
    said = refusal(Plugin(name=f"{__name__}:_asks_elsewhere", params=params))
    assert message in said and "4711" not in said


def test_a_secret_beside_no_name_is_in_no_error():
    with pytest.raises(ValueError, match="is given without a name") as caught:
        Plugin.model_validate({"api_key": "4711"})
    assert "api_key=<hidden>" in caught.value.errors()[0]["msg"]


def of_a_group(episode: object, *, episodes: int = 4) -> float:
    return 0.0


def test_the_name_for_environments_of_whole_groups_is_reserved():
    with pytest.raises(ConfigError, match="has the parameter episodes, which is a reserved name"):
        resolve(Plugin(name=f"{__name__}:of_a_group"), home=ENVIRONMENTS, field="environment")


class Unreachable:
    def __len__(self) -> int:
        raise OSError("no such table")


def of_texts() -> list[str]:
    return ["1 + 1 ="]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("Unreachable", "cannot be opened: OSError: no such table"),
        ("of_texts", "prompt 0 is of type str; it must be a cluster.contracts.types.Prompt"),
    ],
)
def test_a_source_of_a_users_that_gives_no_prompts_is_one_clear_error(source, message):
    with pytest.raises(ConfigError, match=rf"my\.field='{__name__}:{source}':? {message}"):
        prompt_source(Plugin(name=f"{__name__}:{source}"), field="my.field")


def test_a_function_that_does_not_import_is_asked_for_as_one():
    with pytest.raises(
        ConfigError,
        match=r"my.field.function='nowhere' is not valid: .*'nowhere'; it must be a function, as 'my_package",
    ):
        resolve(Plugin(name="trl", params={"function": "nowhere"}), home=REWARDS, field="my.field")


@pytest.mark.parametrize("judge", ["trl", "verl", "openrlhf"])
@pytest.mark.parametrize("constant", ["math:pi", "math.pi"])
def test_a_constant_is_no_function_of_a_judge(judge, constant):
    with pytest.raises(
        ConfigError, match=rf"^my.field.function='{constant}' is not valid: .*; it must be a function, as"
    ):
        resolve(Plugin(name=judge, params={"function": constant}), home=REWARDS, field="my.field")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = (\n", r"SyntaxError: '\(' was never closed \(scores_\w+.py, line 1\); mend it"),
        ("import nosuchpkg\n", "ModuleNotFoundError: No module named 'nosuchpkg'; mend it"),
        ("raise ValueError('data file missing')\n", "ValueError: data file missing; mend it"),
        ("import sys\nsys.exit('no licence')\n", "SystemExit: no licence; mend it"),
        ("def other(): ...\n", r"\S*scores_\w+.py has no 'f'; it has: other"),
        (
            None,
            r"there is no module 'scores_\w+'; start the command in the folder of scores_\w+.py, or name that folder .*",
        ),
    ],
)
def test_a_function_in_a_parameter_says_why_it_does_not_import_as_a_judge_does(text, why, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    module = f"scores_{tmp_path.name}"
    if text is not None:
        (tmp_path / f"{module}.py").write_text(text)
    judges = [Plugin(name=name, params={"function": f"{module}:f"}) for name in ("trl", "verl", "openrlhf")]
    for field, judge in [("", Plugin(name=f"{module}:f")), *((".function", each) for each in judges)]:
        with pytest.raises(ConfigError, match=rf"^my.field{field}='{module}:f' does not import: {why}$"):
            resolve(judge, home=REWARDS, field="my.field")


def test_a_function_in_a_parameter_may_be_named_with_a_dot_and_an_optional_one_be_null():
    def taken(render):
        plugin = Plugin(name="gym", params={"id": "x", "render": render})
        return resolve(plugin, home=ENVIRONMENTS, field="environment").keywords["render"]

    assert taken("json:dumps") is taken("json.dumps") is json.dumps
    assert taken(None) is None
    with pytest.raises(ConfigError, match=r"environment.render='json:dump_all' does not import: \S+ has no 'dump_all'"):
        taken("json:dump_all")


@pytest.mark.parametrize(
    ("judge", "param"),
    [("code_stdin", {"tolerance": -1}), ("code_function", {"tolerance": -1}), ("format", {"tags": []})],
)
def test_a_parameter_with_which_no_completion_is_right_is_refused(judge, param):
    with pytest.raises(ConfigError, match=r"my\.field\.\w+=\S+ is not valid"):
        resolve(Plugin(name=judge, params=param), home=REWARDS, field="my.field")


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("http://host/x?token=secret", "my.field.endpoint.urls: 'http://host/x' with a query must be a URL as"),
        ("http://me:secret@host", "my.field.endpoint.urls: the URL of host has a user or password in it; use key_env"),
        (
            {"urls": ["http://host"], "key": "secret"},
            "my.field.endpoint.key: Extra inputs are not permitted; .* key_env",
        ),
        (
            {"urls": ["http://host"], "max_concurrency": 0},
            "my.field.endpoint.max_concurrency=0: Input should be greater",
        ),
        (
            {"urls": ["http://host"], "max_concurrency": True},
            "my.field.endpoint.max_concurrency=True: Input should be a valid integer",
        ),
    ],
)
def test_a_mistake_in_an_endpoint_names_its_setting_and_shows_no_secret(endpoint, message):
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(Plugin(name="remote", params={"endpoint": endpoint}), home=REWARDS, field="my.field")
    assert "secret" not in str(caught.value)


def test_a_limit_of_the_sandbox_is_not_true():
    judge = Plugin(name="code_stdin", params={"sandbox": {"time_s": True}})
    with pytest.raises(ConfigError, match=r"my\.field\.sandbox\.time_s=True: Input should be a valid number"):
        resolve(judge, home=REWARDS, field="my.field")


def test_a_function_of_any_keywords_takes_any():
    assert resolve(Plugin(name="anything", params={"x": 1}), home=HERE, field="my.field")() == {"x": 1}


@pytest.fixture
def package(tmp_path, monkeypatch) -> Home:
    """A home of several files, none of which may be imported for its names."""
    (tmp_path / "house_of_tests").mkdir()
    files = {
        "__init__": "",
        "regex": "raise ImportError\ndef regex(*, pattern): ...\ndef helper(*, pattern): ...",
        "classy": "class Classy:\n    def __init__(self, pattern): ...\nclassy = Classy",
        "many": "def one(pattern): ...\nasync def other(pattern): ...\ndef _own(pattern): ...\ndef third(x): ...",
        "torn": "def torn(pattern):\n    return (\n",
        "script": "import sys\ndef script(pattern): ...\nsys.exit()",
    }
    for name, text in files.items():
        (tmp_path / "house_of_tests" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return Home(package="house_of_tests", works_on=frozenset({"pattern"}))


def test_a_file_of_its_own_name_holds_one_variant_and_another_file_all_that_have_the_right_signature(package):
    assert names(package) == ["classy", "one", "other", "regex", "script"]


def test_an_own_module_that_raises_or_misses_another_one_says_why(package, tmp_path):
    for name, text in {"raises": "1 / 0", "misses": "import not_installed_here"}.items():
        (tmp_path / f"own_{name}.py").write_text(f"{text}\ndef judge(pattern): ...\n")
    with pytest.raises(ConfigError, match=r"does not import: ZeroDivisionError: division by zero; mend it$"):
        find(Plugin(name="own_raises:judge"), home=package, field="x")
    with pytest.raises(ConfigError, match=r"ModuleNotFoundError: No module named 'not_installed_here'; mend it$"):
        find(Plugin(name="own_misses:judge"), home=package, field="x")


@pytest.mark.parametrize("name", ["train.jsonl", "data/train.parquet"])
def test_a_file_in_the_place_of_a_source_of_prompts_is_told_how_files_go(name):
    with pytest.raises(ConfigError, match=rf"x='{name}' is not there; write a file as {{name: file, path: {name}}}; "):
        find(Plugin(name=name), home=PROMPTS, field="x")


def _like_trl(completions: list[str], answer: list[str], **others: object) -> list[float]:
    return [float(each == right) for each, right in zip(completions, answer, strict=True)]


def test_a_judge_that_asks_for_a_column_is_told_where_columns_are():
    with pytest.raises(ConfigError) as error:
        resolve(Plugin(name=f"{__name__}:_like_trl"), home=REWARDS, field="reward.judge")
    assert "needs answer; write reward.judge: " in str(error.value)
    assert "columns of the prompt are in the parameter `columns`" in str(error.value)
    assert "{name: trl, function: 'my_package.module:name'}" in str(error.value)


def test_a_variant_that_is_there_and_does_not_import_says_why(package):
    with pytest.raises(ConfigError, match="x='regex' does not import: ImportError"):
        find(Plugin(name="regex"), home=package, field="x")
    with pytest.raises(ConfigError, match="x='script' does not import: SystemExit"):
        find(Plugin(name="script"), home=package, field="x")


def test_a_file_that_is_not_python_costs_its_own_names_alone(package):
    anywhere = dataclasses.replace(package, works_on=frozenset())
    assert names(anywhere) == ["classy", "one", "other", "regex", "script", "third", "torn"]
    with pytest.raises(ConfigError, match=r"x='torn' does not import: SyntaxError: .* \(torn.py, line 2\)"):
        find(Plugin(name="torn"), home=anywhere, field="x")
    with pytest.raises(ConfigError, match=r"x='two' is not there"):
        find(Plugin(name="two"), home=package, field="x")
    assert find(Plugin(name="one"), home=package, field="x").__name__ == "one"


def test_a_transport_is_no_internal_module_of_weights():
    assert "object_store" in names(TRANSPORTS)
    assert not {"manifest", "broadcast", "vllm_receiver", "adapter"} & set(names(TRANSPORTS))


def test_names_are_had_without_importing_what_they_name():
    text = (
        "import sys; from cluster.contracts import plugins as p; "
        "print([p.names(home) for home in (p.REWARDS, p.PROMPTS, p.SINKS, p.TRANSPORTS)]); "
        "assert not {'torch', 'vllm', 'ray', 'math_verify', 'tensorboard'} & set(sys.modules)"
    )
    listed = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
    assert all(name in listed for home in (REWARDS, PROMPTS, SINKS) for name in names(home))
