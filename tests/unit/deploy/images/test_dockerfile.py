"""The image: parsed, not built, since base images come from a registry."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from deploy.manifests.pods import USER
from tests.unit.deploy.manifests.made import resource, templates_of

ROOT = Path(__file__).parents[4]
FILE = ROOT / "deploy/images/Dockerfile"


def instructions():
    lines = [line for line in FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line]


def of(kind):
    return [rest for name, rest in instructions() if name == kind]


def test_every_instruction_is_one():
    known = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "USER", "CMD"}
    assert {name for name, _ in instructions()} <= known
    assert instructions()[0][0] == "FROM"


def test_base_images_have_a_tag_that_says_which_python():
    for base in of("FROM"):
        python = re.match(r"python:(3\.\d+)-slim-\w+( AS \w+)?$", base)
        assert python and python[1] in ("3.11", "3.12"), base


def test_what_is_copied_is_there_and_is_all_that_is_installed():
    copied = [word for rest in of("COPY") if "--from" not in rest for word in shlex.split(rest)[:-1]]
    assert all((ROOT / each).exists() for each in copied), copied
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {each.rstrip("*") for each in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    needed = packages | {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml"}
    assert {*copied} == needed
    kept = (FILE.parent / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line.removeprefix("!") for line in kept if line.startswith("!")} == needed


def test_the_user_is_the_pods_and_never_root():
    assert of("USER") == [str(USER)]
    for template in templates_of(resource("quickstart.yaml")):
        assert template["spec"]["securityContext"]["runAsUser"] == USER
    assert f"--uid {USER}" in " ".join(of("RUN"))
    assert [name for name, _ in instructions()][-2:] == ["USER", "CMD"]


def test_no_secret_is_an_argument_or_a_variable():
    named = " ".join(of("ARG") + of("ENV")).upper()
    assert not re.search(r"TOKEN|SECRET|PASSWORD|KEY", named)


def test_both_flavours_come_from_the_installer():
    assert of("ARG") == ["FLAVOUR=cpu"]
    assert any('COMPILE=compile deploy/install.sh "$FLAVOUR"' in rest for rest in of("RUN"))


def test_the_image_can_serve_a_model():
    """`ray.serve.llm` is importable in it, and the probes of KubeRay find what they call."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [each.partition(">")[0] for each in project["optional-dependencies"]["serve"]] == ["ray[serve]"]
    installer = (ROOT / "deploy/install.sh").read_text(encoding="utf-8")
    assert re.findall(r"--editable '\.\[(\w+),serve,dev\]'", installer) == ["cpu", "gpu"]
    assert "wget" in " ".join(of("RUN"))


def test_both_stages_have_the_library_that_vllm_needs_on_cpus():
    """The first checks the installation, the second runs it."""
    stages = FILE.read_text(encoding="utf-8").split("\nFROM ")[1:]
    assert [bool(re.search(r"apt-get install .*\blibnuma1\b", stage)) for stage in stages] == [True, True]


def test_both_stages_have_a_compiler():
    """The first for pycosat, which has no wheel, the second for kernels. The base image has Python's headers, and no compiler."""
    stages = FILE.read_text(encoding="utf-8").split("\nFROM ")[1:]
    found = [bool(re.search(r"apt-get install .*\bgcc libc6-dev\b", stage)) for stage in stages]
    assert found == [True, True]


def test_the_home_and_the_command_are_where_pods_look_for_them():
    env = dict(word.partition("=")[::2] for rest in of("ENV") for word in shlex.split(rest))
    assert env["PATH"].startswith("/app/.venv/bin:") and of("WORKDIR") == ["/app", "/app"]
    for template in templates_of(resource("quickstart.yaml")):
        variables = {each["name"]: each.get("value") for each in template["spec"]["containers"][0]["env"]}
        assert {name: variables[name] for name in ("HOME", "HF_HOME")} == {
            name: env[name] for name in ("HOME", "HF_HOME")
        }


@pytest.mark.parametrize("script", of("RUN"))
def test_every_shell_line_parses(script):
    assert subprocess.run(["bash", "-n", "-c", script], capture_output=True).returncode == 0
