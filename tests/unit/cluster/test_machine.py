"""A container's limits, read from files as the kernel writes them."""

from types import SimpleNamespace

import pytest

from cluster import machine

GIB = 1024**3


@pytest.fixture(autouse=True)
def large_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: {0, 1})
    memory = SimpleNamespace(total=256 * GIB, available=200 * GIB)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: memory)


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("900000 100000", 2)]
)
def test_a_container_has_the_whole_cpus_of_its_quota(tmp_path, quota, expected):
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert machine.num_cpus() == expected


def test_a_machine_without_limits_is_itself(tmp_path):
    assert (machine.num_cpus(), machine.total_memory_bytes()) == (2, 256 * GIB)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_memory_bytes() == 200 * GIB


def test_files_that_a_container_keeps_in_memory_make_room(tmp_path):
    (tmp_path / "memory.max").write_text(f"{64 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{63 * GIB}\n")
    assert machine.free_memory_bytes() == GIB
    (tmp_path / "memory.stat").write_text(
        f"anon {3 * GIB}\nfile {60 * GIB}\ninactive_file {50 * GIB}\nactive_file {10 * GIB}\n"
    )
    assert machine.free_memory_bytes() == 61 * GIB
    assert machine.total_memory_bytes() == 64 * GIB
