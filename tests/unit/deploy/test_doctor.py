"""Each fault of a machine is found, with what to do about it; a machine without one has none."""

import importlib.metadata
import shutil
import socket
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from deploy import doctor
from deploy.cli import app

Usage = namedtuple("Usage", "total used free")
Memory = namedtuple("Memory", "total available")
GIB = 1024**3


def advice(name: str) -> str:
    return {each.name: each.advice for each in doctor.examined()}[name]


@pytest.fixture(autouse=True)
def a_machine_that_is_well(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(16 * GIB, 12 * GIB))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(100 * GIB, 50 * GIB, 50 * GIB))
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda limit: (65536, 1048576))
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(doctor, "_sandbox", lambda: iter(()))


def test_where_all_is_well_there_is_nothing_to_do():
    assert {each.name: each.advice for each in doctor.examined() if each.advice} == {}
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0 and "torch" in result.output


def test_a_fault_is_shown_with_its_advice_and_is_an_exit_code(monkeypatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda limit: (1024, 1048576))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1 and "ulimit -n 65536" in result.output


def test_little_shared_memory_is_a_containers_and_says_how_to_have_more(monkeypatch):
    little = lambda place: Usage(GIB, GIB, (64 * 1024**2) if Path(place) == Path("/dev/shm") else 50 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", little)
    assert "--shm-size=4g" in advice("shared memory")


def test_little_memory_and_a_full_disk_are_faults(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(16 * GIB, GIB))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(GIB, GIB, GIB))
    assert "free 4 GiB" in advice("memory") and "free 5 GiB" in advice("disk here")


def test_a_dependency_of_another_version_and_one_that_is_missing_are_named(monkeypatch):
    versions = {"typer": None, "rich": "1.0"}

    def version(name: str) -> str:
        if name in versions:
            if versions[name] is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]
        return true_version(name)

    true_version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", version)
    (found,) = [each for each in doctor.examined() if each.name == "versions"]
    assert (
        "typer is missing" in found.value and "rich 1.0 is not >=13.9" in found.value and "make install" in found.advice
    )


def test_a_library_that_vllm_needs_on_cpus_is_found_missing(monkeypatch):
    monkeypatch.setattr(doctor, "_loads", lambda library: library != "libnuma.so.1")
    assert "install the package libnuma1" in advice("vLLM")


def test_a_gpu_beside_an_installation_for_cpus_says_how_to_have_the_other(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(doctor, "_gpu_names", lambda: "NVIDIA H100 80GB HBM3, 81559 MiB, 570.1")
    assert "make install GPU=1" in advice("GPUs")


def test_a_cluster_that_does_not_answer_is_told_of_before_a_run_asks_it(monkeypatch):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # until it listens it refuses, and nobody else can have the port
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        assert "ray start --head" in advice("Ray")
        server.listen()
        assert advice("Ray") == ""


def test_with_an_empty_address_of_a_cluster_each_run_starts_its_own(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "")
    (found,) = (each for each in doctor.examined() if each.name == "Ray")
    assert found.value.startswith("each run starts its own") and found.advice == ""


@pytest.mark.parametrize("variable", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", None])
def test_a_token_is_found_where_ray_looks_for_it(monkeypatch, tmp_path, variable):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setattr(doctor, "_DEFAULT_TOKEN", token := tmp_path / "auth_token")
    said = lambda: next(each.value for each in doctor.examined() if each.name == "Ray")
    assert said() == "runs go to RAY_ADDRESS=auto, without a token"
    if variable:
        monkeypatch.setenv(variable, "secret")
    else:
        token.write_text("secret")
    assert said() == "runs go to RAY_ADDRESS=auto, with a token"
