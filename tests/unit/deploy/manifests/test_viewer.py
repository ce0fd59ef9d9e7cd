"""The viewer's pod may read the runs and nothing else, and its command is one that the viewer takes."""

import shlex

from typer.main import get_command

from deploy.cli import app
from deploy.manifests import pod_standard
from deploy.manifests.reading import Head
from tests.unit.deploy.manifests.made import committed, resource, templates_of


def _pod() -> dict:
    return committed("viewer.yaml")[0]["spec"]["template"]


def test_it_keeps_the_restricted_standard_and_has_no_key_to_the_api_server():
    assert [*pod_standard.problems(Head.model_validate({"template": _pod()}))] == []
    assert _pod()["spec"]["automountServiceAccountToken"] is False


def test_the_volume_of_the_runs_is_read_only_twice():
    (claim,) = committed("storage.yaml")
    (container,) = _pod()["spec"]["containers"]
    volume = next(each for each in _pod()["spec"]["volumes"] if "persistentVolumeClaim" in each)
    assert volume["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"], "readOnly": True}
    mount = next(each for each in container["volumeMounts"] if each["name"] == volume["name"])
    assert mount["readOnly"] is True


def test_its_command_is_one_that_the_viewer_takes_and_its_token_comes_from_a_secret():
    (container,) = _pod()["spec"]["containers"]
    name, verb, *arguments = container["command"]
    view = get_command(app).commands[verb]  # pyright: ignore
    asked = view.make_context(f"{name} {verb}", shlex.split(shlex.join(arguments))).params
    assert asked["run_dirs"] == [container["volumeMounts"][0]["mountPath"]]
    assert asked["port"] == container["ports"][0]["containerPort"]
    token = next(each for each in container["env"] if each["name"] == asked["token_env"])
    assert token["valueFrom"]["secretKeyRef"] == {"name": "treadwheel-viewer", "key": "token"}


def test_its_service_finds_its_pods_and_no_run_policy_does():
    _, service = committed("viewer.yaml")
    assert (
        service["spec"]["selector"] == _pod()["metadata"]["labels"] == {"app.kubernetes.io/name": "treadwheel-viewer"}
    )
    (container,) = _pod()["spec"]["containers"]
    assert [port["targetPort"] for port in service["spec"]["ports"]] == [container["ports"][0]["name"]]


def test_its_image_is_that_of_the_runs_beside_it():
    gpu = templates_of(resource("gpu.yaml"))[0]["spec"]["containers"][0]
    assert _pod()["spec"]["containers"][0]["image"] == gpu["image"]
