"""Site files: what is wrong with one is told by field, value and way out."""

import pytest

from cluster.contracts.errors import ConfigError
from deploy.manifests.site import Site, load


def test_a_run_needs_no_site_file():
    assert load(None) == Site()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("image: ray", "'ray' may be another image tomorrow; use a tag other than latest"),
        ("image: host:5000/ray", "'host:5000/ray' may be another image tomorrow"),
        ("image: ray:latest", "'ray:latest' may be another image tomorrow"),
        ("run_claim: My_Volume", "run_claim: 'My_Volume' is not a name for Kubernetes"),
        ("name: 7b", "name: '7b' is not a name for a job and its pods"),
        ("namespace: team.a", "namespace: 'team.a' is not a namespace's name"),
        ("ray_version: 2.55.1", "'2.55.1' does not know priorities of groups; build the image with Ray 2.56 or later"),
        ("grace_s: 20", "grace_s=20 is not valid: input should be greater than or equal to 25"),
        ("env: {HF_TOKEN: abc}", "secrets: {HF_TOKEN: {secret: NAME, key: KEY}}"),
        ("env: {PROXY: 'http://user:word@host'}", "PROXY looks like a secret"),
        ("env: {NOTE: hf_abcdefghijklmnopqrstuvwxyz01234567}", "NOTE looks like a secret"),
        ("env: {A-B: x}", "env.A-B: 'A-B' is not a variable's name"),
        ("env: {HOME: /root}", "env: HOME is set by the manifest"),
        ("{env: {A: x}, secrets: {A: {secret: hub, key: k}}}", "A is in env and in secrets; remove one"),
        ("secrets: {HF_TOKEN: {secret: hub}}", "secrets.HF_TOKEN.key"),
        ("secrets: {A B: {secret: hub, key: k}}", "secrets.A B: 'A B' is not a variable's name"),
        ("secrets: {A: {secret: Hub_x, key: k}}", "secrets.A.secret: 'Hub_x' is not a Secret's name"),
        ("secrets: {A: {secret: hub, key: ''}}", "secrets.A.key: '' is not a key of a Secret"),
        ("on_demand: {node_selector: {'bad key!!': x}}", "'bad key!!' is not a label's key"),
        ("on_demand: {node_selector: {-/key: x}}", "'-/key' is not a label's key"),
        ("spot: {node_selector: {pool: x y}}", "spot.node_selector.pool: 'x y' is not a label's value"),
        ("spot: {tolerations: [{key: spot, operator: Is}]}", "input should be 'exists' or 'equal'"),
        ("spot: {tolerations: [{key: spot, value: 'yes'}]}", "counts only with operator: Equal"),
        ("secrets: {HOME: {secret: hub, key: k}}", "site.yaml: secrets.HOME is set by the manifest"),
        ("gpu_resource: gpu", "gpu_resource: 'gpu' is not a resource of a device plug-in, such as nvidia.com/gpu"),
        ("images: ray:1", "images is not a setting of a site; there are: name, namespace, image"),
        ("[image]", "site.yaml must be a mapping of settings such as 'image:', got list"),
        ("image: [", "cannot be read as YAML"),
    ],
)
def test_a_mistake_is_named_with_the_way_out(tmp_path, text, told):
    file = tmp_path / "site.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"site\.yaml") as error:
        load(str(file))
    assert told in str(error.value)


def test_names_are_those_that_kubernetes_takes(tmp_path):
    file = tmp_path / "site.yaml"
    file.write_text("{namespace: 3d-team, run_claim: data.7b, token_secret: 7b.token, queue: team.a}")
    site = load(str(file))
    assert [site.namespace, site.run_claim, site.token_secret, site.queue] == [
        "3d-team",
        "data.7b",
        "7b.token",
        "team.a",
    ]


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read: No such file"):
        load("nowhere.yaml")


def test_a_file_of_another_encoding_is_named(tmp_path):
    (tmp_path / "site.yaml").write_bytes(b"name: caf\xe9")
    with pytest.raises(ConfigError, match=r"site\.yaml is not UTF-8"):
        load(str(tmp_path / "site.yaml"))


@pytest.mark.parametrize("image", ["ray:1", "host:5000/me/ray:1-gpu", "ray@sha256:0123"])
def test_an_image_that_stays_the_same_is_taken(image):
    assert Site(image=image).image == image


@pytest.mark.parametrize(
    "text",
    [
        "env: {TOKENIZERS_PARALLELISM: 'false', MONKEYS: '3', KEYBOARD: x}",
        "secrets: {HF_TOKEN: {secret: my.hub-1, key: tls_key.pem}}",
        "on_demand: {node_selector: {cloud.example.com/Pool_1: '', a: B.c-d_e}}",
        "spot: {tolerations: [{key: a/b, operator: Equal, value: 'true', effect: NoExecute}]}",
    ],
)
def test_names_that_kubernetes_takes_are_taken(tmp_path, text):
    file = tmp_path / "site.yaml"
    file.write_text(text)
    assert load(str(file)) != Site()
