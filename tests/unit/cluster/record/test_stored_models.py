"""A checkpoint's model in an object store becomes a local folder."""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.contracts.config import RunConfig
from cluster.contracts.errors import CheckpointError, ConfigError
from cluster.record.storage import Storage
from cluster.record.stored_models import CACHE_ENV, cache, local_folder, with_local_models
from tests.object_store import quick_requests, s3
from tests.store_proxy import Proxy
from tests.unit.learner.disk import largest_file

CHECKPOINT = "s3://models/run/checkpoints/step-000010"
URL = f"{CHECKPOINT}/model"
FILES = {"model/config.json": b"{}", "model/model.safetensors": b"weights", "state.safetensors": b"not the model's"}


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with s3("models") as proxy:
        yield proxy


@pytest.fixture
def store(server: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Storage]:
    quick_requests(monkeypatch)
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "cache"))
    storage = Storage(CHECKPOINT)
    for name, content in FILES.items():
        storage.write_file(name, content)
    entries = {name: {"sha256": hashlib.sha256(content).hexdigest()} for name, content in FILES.items()}
    storage.write_file("manifest.json", json.dumps({"files": entries}).encode())
    yield storage
    server.fault = lambda method, path, number: None


def _gets(server: Proxy) -> list[str]:
    """The objects that are read from now on."""
    found: list[str] = []
    server.fault = lambda method, path, number: found.append(path.rpartition("/")[2]) if method == "GET" else None
    return found


def test_a_model_is_downloaded_once_by_all_processes_of_a_machine(store: Storage, server: Proxy, tmp_path: Path):
    found = _gets(server)
    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(lambda _: local_folder(URL, field="model.path"), range(4)))
    (folder,) = map(Path, folders)
    assert folder.parent == tmp_path / "cache" / "models"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "config.json": b"{}",
        "model.safetensors": b"weights",
    }
    assert found.count("model.safetensors") == 1 and "state.safetensors" not in found


def test_files_that_lie_in_a_folder_of_the_save_are_found_there(store: Storage):
    entry = {"sha256": hashlib.sha256(b"theirs").hexdigest()}
    store.write_file("3f9c/model/config.json", b"theirs")
    store.write_file("manifest.json", json.dumps({"folder": "3f9c", "files": {"model/config.json": entry}}).encode())
    (file,) = Path(local_folder(URL, field="model.path")).iterdir()
    assert (file.name, file.read_bytes()) == ("config.json", b"theirs")


def test_an_altered_file_is_refused_and_not_kept(store: Storage, tmp_path: Path):
    store.write_file("model/model.safetensors", b"Weights")
    with pytest.raises(CheckpointError, match=r"step-000010 was altered: model/model\.safetensors has another digest"):
        local_folder(URL, field="model.path")
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_a_download_that_breaks_off_leaves_nothing_that_looks_whole(store: Storage, server: Proxy):
    server.fault = lambda method, path, number: "403:AccessDenied" if "model.safetensors" in path else None
    with pytest.raises(
        ConfigError, match=r"model\.path='s3://.*cannot be downloaded into .*403 Forbidden.*TREADWHEEL_CACHE"
    ):
        local_folder(URL, field="model.path")
    server.fault = lambda method, path, number: None
    assert (Path(local_folder(URL, field="model.path")) / "model.safetensors").read_bytes() == b"weights"


def test_a_disk_that_takes_a_part_of_a_file_is_full_and_the_checkpoint_is_not_altered(store: Storage):
    """Seen in review: the system takes what has room and says how much, which nobody read; the digest of the rest was then wrong."""
    says = r"model\.path='s3://.*cannot be downloaded into .*No space left on device"
    with largest_file(4), pytest.raises(ConfigError, match=says):
        local_folder(URL, field="model.path")


@pytest.mark.parametrize("path", [f"{CHECKPOINT}/adapters", "s3://models/elsewhere/model", "s3://models/model"])
def test_what_is_no_checkpoints_model_is_refused_by_name(store: Storage, path: str):
    with pytest.raises(ConfigError, match=rf"reference\.path='{path}' is no model of a checkpoint of ours"):
        local_folder(path, field="reference.path")


def test_a_folder_and_a_hub_name_are_left_as_they_are_and_a_home_is_written_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    for path in ("/models/small", "org/model", "~nobody-here/model"):
        assert local_folder(path, field="model.path") == path
    assert local_folder("~/model", field="model.path") == "/home/me/model"


def test_the_folder_of_downloads_is_named_as_paths_of_models_are(monkeypatch: pytest.MonkeyPatch):
    """A home that is not there, as of a container's user without a name, ended the run with a RuntimeError."""
    monkeypatch.setenv("HOME", "/home/me")
    for named, folder in (("~/models", "/home/me/models"), ("~nobody-here/models", "~nobody-here/models")):
        monkeypatch.setenv(CACHE_ENV, named)
        assert str(cache()) == folder


def test_every_model_of_a_configuration_becomes_local_and_the_rest_stays(store: Storage, tmp_path: Path):
    config = RunConfig.model_validate(
        {
            "model": {"path": URL},
            "prompts": "file",
            "reference": {"path": URL, "by_source": {"maths": URL, "code": "org/model"}},
            "algorithm": {"advantage": "gae", "value": {"path": URL}},
            "reward": {
                "parts": {name: {"judge": {"name": "reward_model", "model": name}} for name in ("good", "near")},
                "models": {"good": {"path": URL}, "near": {"path": "/model"}},
            },
        }
    )
    local = with_local_models(config)
    folder = local.model.path
    assert Path(folder).is_dir() and local.reference.path == folder
    assert local.reference.by_source == {"maths": folder, "code": "org/model"}
    assert local.algorithm.value and local.algorithm.value.path == folder
    assert {name: model.path for name, model in local.reward.models.items()} == {"good": folder, "near": "/model"}
    assert URL not in local.model_dump_json() and config.model.path == URL
