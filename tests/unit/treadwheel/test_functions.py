"""A function of a script is what a run file would name, or the way out is said."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cluster.contracts.errors import ConfigError
from tests.unit.treadwheel import my_functions
from treadwheel.functions import named

HERE = "tests.unit.treadwheel.my_functions"


@pytest.mark.parametrize(
    ("given", "as_a_run_file_says"),
    [
        ("math_verify", "math_verify"),
        ({"name": "regex", "pattern": "a"}, {"name": "regex", "pattern": "a"}),
        (my_functions.judge, f"{HERE}:judge"),
        (my_functions.Source, f"{HERE}:Source"),
        (partial(my_functions.judge, weight=2.0), {"name": f"{HERE}:judge", "weight": 2.0}),
        (partial(partial(my_functions.judge, weight=2.0), weight=3.0), {"name": f"{HERE}:judge", "weight": 3.0}),
    ],
)
def test_a_name_stays_and_a_function_of_a_module_goes_by_its_path(given, as_a_run_file_says):
    assert named(given, argument="judge") == as_a_run_file_says


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (lambda completion: 0.0, "a lambda"),
        (my_functions.made_inside(), "functools.partial"),
        (partial(my_functions.judge, "text"), "bind them by name"),
        (7, "no function or class"),
    ],
)
def test_what_no_other_process_could_import_is_refused_with_the_way_out(given, says):
    with pytest.raises(ConfigError, match=says):
        named(given, argument="judge")


@pytest.mark.parametrize(
    ("value", "in_a_run_file"),
    [
        (np.float32(2), 2.0),
        (np.int64(2), 2),
        ([np.float64(1.0), np.arange(2)], [1.0, [0, 1]]),
        (Path("x"), "x"),
        (2.5, 2.5),
        (None, None),
    ],
)
def test_parameters_are_what_a_run_file_has_for_them(value, in_a_run_file):
    """Seen in review: pydantic's serialization error, which named no argument."""
    for given in (partial(my_functions.judge, weight=value), {"name": f"{HERE}:judge", "weight": value}):
        params = named(given, argument="judge")
        assert params == {"name": f"{HERE}:judge", "weight": in_a_run_file}
        assert type(params["weight"]) is type(in_a_run_file)


@pytest.mark.parametrize(
    ("value", "kind"), [(float, "type"), (my_functions.judge, "function"), ({1, 2}, "set"), (b"x", "bytes")]
)
def test_a_parameter_that_json_lacks_is_refused_by_its_name(value, kind):
    for given in (partial(my_functions.judge, weight=value), {"name": f"{HERE}:judge", "weight": value}):
        with pytest.raises(ConfigError, match=rf"^environment\.weight: .* is a {kind}; give a text, a number"):
            named(given, argument="environment")


def told(folder: Path, name: str, script: str, *, stdin: str | None = None) -> str:
    """What Python says of a script, or of what is typed into it."""
    (folder / name).write_text(script)
    command = [sys.executable, *([str(folder / name)] if stdin is None else ["-"])]
    env = {"PYTHONPATH": f"{Path(__file__).parents[3]}:{folder}"}
    ran = subprocess.run(command, cwd=folder, env=env, input=stdin, capture_output=True, text=True, check=False)
    return ran.stdout + ran.stderr


JUDGE = "import treadwheel\nfrom treadwheel.functions import named\ndef judge(*, completion): return 0.0\n"


def test_a_function_of_the_script_goes_by_the_scripts_name(tmp_path):
    script = f"{JUDGE}if __name__ == '__main__': print(named(judge, argument='judge'))"
    assert told(tmp_path, "my_script.py", script) == "my_script:judge\n"


def test_a_script_that_trains_when_it_is_imported_is_told_where_the_call_belongs(tmp_path):
    script = f"{JUDGE}treadwheel.train({{}}, judge=judge)"
    assert "'my_script' calls treadwheel.train when it is imported" in told(tmp_path, "my_script.py", script)


@pytest.mark.parametrize("name", ["my-script.py", "learner.py"])
def test_a_script_that_cannot_be_imported_by_its_name_is_to_be_renamed(tmp_path, name):
    assert "rename it" in told(tmp_path, name, f"{JUDGE}named(judge, argument='judge')")


def test_a_function_that_was_typed_in_is_to_be_written_into_a_file(tmp_path):
    assert "%%writefile my_functions.py" in told(tmp_path, "x.py", "", stdin=f"{JUDGE}named(judge, argument='judge')")


def test_a_function_that_is_not_there_when_the_script_is_imported_is_missed(tmp_path):
    script = (
        "from treadwheel.functions import named\nif __name__ == '__main__':\n    def judge(*, completion): return 0.0\n"
    )
    script += "    named(judge, argument='judge')"
    assert "outside of any condition" in told(tmp_path, "my_script.py", f"import treadwheel\n{script}")
