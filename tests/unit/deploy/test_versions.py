"""Two states of treadwheel's code that call themselves one version are told apart."""

import shutil

from deploy import versions as module


def test_the_digest_of_the_code_changes_with_a_file_and_with_its_name(tmp_path, monkeypatch):
    for package in ("actors", "cluster", "learner", "deploy"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "deploy" / "versions.py"))
    began = module._digest_of_own_code()
    (tmp_path / "deploy" / "a.py").write_text("x = 2\n")
    (tmp_path / "learner" / "notes.txt").write_text("no code\n")
    assert module._digest_of_own_code() == began
    (tmp_path / "learner" / "a.py").write_text("x = 2\n")
    changed = module._digest_of_own_code()
    shutil.move(tmp_path / "learner" / "a.py", tmp_path / "learner" / "b.py")
    assert len({began, changed, module._digest_of_own_code()}) == 3


def test_versions_name_python_torch_and_the_code():
    assert {"python", "torch", "ray", "treadwheel", "treadwheel_code"} <= module.versions().keys()
