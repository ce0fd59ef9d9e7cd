"""Workers are forked of a process that has imported what they need; and start as ever where there is none."""

import contextlib
import importlib
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cluster.remote import fork_server as fork_server_module
from cluster.remote import forked_worker
from cluster.remote.fork_server import ForkServer, fork_server

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="Linux alone forks workers")]

ROOT = Path(__file__).parents[4]
LITTLE = "tests.unit.cluster.remote.test_fork_server:import_little"
IMPORTED = "_a_module_that_only_the_server_has_imported"

Ask = Callable[..., "subprocess.CompletedProcess[str]"]


def import_little() -> None:
    sys.modules[IMPORTED] = sys


def import_torch() -> None:
    importlib.import_module("torch")


def import_until_told() -> None:
    while not os.path.exists(os.environ["MAY_SERVE"]):
        time.sleep(0.01)


def import_little_when_told() -> None:
    import_until_told()
    import_little()


def fail_to_import() -> None:
    raise ImportError("nothing of the kind")


def answer(question: str) -> str:
    """After what was imported first, and before the rest."""
    return f"{question}: {IMPORTED in sys.modules} {sys.modules.get('_imported_last') is not None} {threading.active_count()}"


def fail_to_answer(question: str) -> str:
    Path(os.environ["ASKED"]).write_text(question)
    raise ValueError(question)


def import_last() -> None:
    sys.modules["_imported_last"] = sys


@contextlib.contextmanager
def observed_server(imports: str) -> Iterator[tuple[psutil.Process, ForkServer]]:
    before = set(psutil.Process().children())
    with fork_server(imports) as server:
        (process,) = set(psutil.Process().children()) - before
        yield process, server


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's, of 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def _finds_tests(short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    monkeypatch.setattr(fork_server_module, "_ANSWER_S", 600.0)


def stand_in(folder: Path, *, patience_s: float) -> str:
    """Path of the script that stands in for Ray's, with another patience: on a busy machine the server may import for long."""
    text, path = Path(forked_worker.__file__).read_text(), folder / f"forked_worker_{patience_s:g}.py"
    assert text.count("_PATIENCE_S = 20.0") == 1
    path.write_text(text.replace("_PATIENCE_S = 20.0", f"_PATIENCE_S = {patience_s}"))
    return str(path)


@pytest.fixture
def patient(tmp_path: Path) -> str:
    return stand_in(tmp_path, patience_s=600.0)


@pytest.fixture
def ask(tmp_path: Path, patient: str) -> Ask:
    """Starts a worker as Ray does, of whose program the test gives the text. Ray's own script says only that it was asked."""
    (tmp_path / "ray/_private/workers").mkdir(parents=True)
    (tmp_path / "ray/__init__.py").touch()
    (tmp_path / "ray/_private/workers/setup_worker.py").write_text(
        "import os, sys; print('as ever', *sys.argv[2:]); open(os.environ.get('MAY_SERVE', os.devnull), 'w')"
    )
    worker = tmp_path / "default_worker.py"

    def start(program: str, *options: str, by: tuple[str, ...] = (), **env: str) -> "subprocess.CompletedProcess[str]":
        worker.write_text(program)
        script = [*by, patient] if by[:1] == ("-c",) else by or [patient]
        command = [sys.executable, *script, str(worker), *options, "--language=PYTHON"]
        path = os.pathsep.join([str(tmp_path), str(ROOT)])
        return subprocess.run(
            command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path} | env, capture_output=True, text=True
        )

    return start


def test_a_forked_worker_has_what_the_asking_process_has_and_what_the_server_imported(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f"""
import os, sys
print(sys.argv[1:], os.environ["OWN"], "SERVERS" in os.environ, os.getcwd(), __name__, {IMPORTED!r} in sys.modules)
print(sys.modules.get("ray"), file=sys.stderr)
"""
    monkeypatch.setenv("SERVERS", "own")
    with fork_server(LITTLE):
        monkeypatch.delenv("SERVERS")
        ended = ask(program, "--worker-id=7", OWN="its own")

    assert ended.stdout == f"['--worker-id=7'] its own False {tmp_path} __main__ True\n"
    assert ended.stderr == "None\n", "Ray would have read the server's environment"
    assert forked_worker.ADDRESS not in os.environ


def test_each_forked_worker_has_a_group_of_its_own_which_ray_ends_with_it(ask: Ask) -> None:
    with fork_server(LITTLE):
        assert ask("import os; print(os.getpgid(0) == os.getpid())").stdout == "True\n"


def test_a_forked_worker_learns_how_its_own_processes_ended(ask: Ask) -> None:
    """The server lets the system forget its workers: a worker that did so too would take each failed program for a good one."""
    with fork_server(LITTLE):
        assert ask("import subprocess; print(subprocess.run('false').returncode)").stdout == "1\n"


def test_a_forked_worker_has_no_descriptors_of_the_server_or_of_workers_before_it(ask: Ask) -> None:
    """Its input, output and errors, and the folder that it lists."""
    with fork_server(LITTLE):
        assert [ask("import os; print(len(os.listdir('/proc/self/fd')))").stdout for _ in range(2)] == ["4\n"] * 2


def test_a_forked_worker_has_the_blocked_signals_of_the_asking_process(ask: Ask) -> None:
    """Else a terminal that closes would end it."""
    asker = "import runpy, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP]); "
    asker += "del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    program = "import signal; print(signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    with fork_server(LITTLE):
        assert ask(program, by=("-c", asker)).stdout == "True\n"


def test_a_forked_worker_has_the_limits_of_the_asking_process_and_goes_first_where_memory_is_short(ask: Ask) -> None:
    program = (
        "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], open('/proc/self/oom_score_adj').read())"
    )
    asker = "import resource, runpy, sys; open('/proc/self/oom_score_adj', 'w').write('1000'); "
    asker += "resource.setrlimit(resource.RLIMIT_NOFILE, (99, resource.getrlimit(resource.RLIMIT_NOFILE)[1])); "
    asker += "del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    with fork_server(LITTLE):
        assert ask(program, by=("-c", asker)).stdout.split() == ["99", "1000"]


def test_a_forked_worker_finds_modules_where_the_asking_process_does(ask: Ask, tmp_path: Path) -> None:
    own, served = str(tmp_path / "own"), str(ROOT)
    with fork_server(LITTLE):
        found = ask("import sys; print(*sys.path)", PYTHONPATH=os.pathsep.join([own, served])).stdout.split()

    assert found[:2] == [str(tmp_path), own] and found.count(served) == 1


def test_each_forked_worker_draws_random_numbers_of_its_own(ask: Ask) -> None:
    program = "import numpy, random, torch; print(random.random(), numpy.random.random(), float(torch.rand(())))"
    with fork_server("tests.unit.cluster.remote.test_fork_server:import_torch"):
        draws = " ".join(ask(program).stdout for _ in range(2)).split()

    assert len(set(draws)) == 6


def test_a_forked_worker_is_where_the_asking_process_is_even_if_that_folder_was_removed(
    ask: Ask, patient: str, tmp_path: Path
) -> None:
    program = "import os; print(os.path.exists('here'), os.stat('.').st_nlink)"
    gone = "import os, runpy, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); del sys.argv[0]; "
    gone += "runpy.run_path(sys.argv[0], run_name='__main__')"
    with fork_server(LITTLE):
        (tmp_path / "here").touch()
        assert ask(program).stdout.startswith("True")
        worker = tmp_path / "default_worker.py"
        command = [sys.executable, "-c", gone, patient, str(worker), "--language=PYTHON"]
        assert subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout == "False 0\n"


def test_a_worker_with_an_environment_of_its_own_starts_as_ever(ask: Ask) -> None:
    with fork_server(LITTLE):
        ended = ask("", "--serialized-runtime-env-context={}")

    assert ended.stdout == "as ever --serialized-runtime-env-context={} --language=PYTHON\n"


def test_a_worker_starts_as_ever_without_a_server(ask: Ask) -> None:
    assert ask("", "--worker-id=7").stdout == "as ever --worker-id=7 --language=PYTHON\n"


def test_a_worker_starts_as_ever_when_the_server_ends_as_it_imports(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    with observed_server("tests.unit.cluster.remote.test_fork_server:fail_to_import") as (server, _):
        assert ask("").stdout == "as ever --language=PYTHON\n"
        while server.status() != psutil.STATUS_ZOMBIE:  # it has closed its socket, and is about to end
            time.sleep(0.01)

    assert capsys.readouterr().err.endswith("ended: ImportError: nothing of the kind\n")


def test_a_worker_starts_as_ever_once_it_has_waited_for_long_and_no_second_one_comes_of_it(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would wait for it without end."""
    monkeypatch.setenv("MAY_SERVE", str(tmp_path / "may_serve"))
    with observed_server("tests.unit.cluster.remote.test_fork_server:import_until_told") as (server, _):
        program = f"open({str(tmp_path / 'forked')!r}, 'w')"
        impatient = stand_in(tmp_path, patience_s=0.1)
        assert ask(program, by=(impatient,)).stdout == "as ever --language=PYTHON\n"
        ended = ask("print('forked')")
        while server.children():  # what came of the first request ends too
            time.sleep(0.01)

    assert ended.stdout == "forked\n" and not (tmp_path / "forked").exists()


@pytest.mark.parametrize("is_killed", [True, False], ids=["is killed", "stands still"])
def test_descriptors_of_a_worker_that_has_not_asked_to_the_end_are_closed(
    is_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server_module, "_PATIENCE_S", 0.01)
    reading, writing = os.pipe()
    asker, connection = socket.socketpair(socket.AF_UNIX)
    with connection, asker:
        socket.send_fds(asker, [(100).to_bytes(4)], [writing])
        os.close(writing)
        if is_killed:
            asker.close()
        assert fork_server_module._received(connection) is None
    os.set_blocking(reading, False)
    with open(reading, "rb") as pipe:
        assert pipe.read() == b"", "None: the pipe still has a writer"


def test_a_server_that_was_killed_is_no_server(ask: Ask) -> None:
    with observed_server(LITTLE) as (server, _):
        server.kill()
        server.wait(timeout=60)

        assert ask("").stdout == "as ever --language=PYTHON\n"


def test_a_server_ends_with_the_process_that_started_it_and_its_workers_go_on(
    tmp_path: Path, short: Path, patient: str
) -> None:
    program = f"""
import os, subprocess, sys, time
from cluster.remote.fork_server import fork_server
with fork_server({LITTLE!r}):
    subprocess.run([sys.executable, {patient!r}, {str(tmp_path / "default_worker.py")!r}, "--language=PYTHON"])
    while not os.path.exists({str(tmp_path / "told")!r}):
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
"""
    (tmp_path / "default_worker.py").write_text(
        f"import os, time; print(os.getppid(), os.getpid(), flush=True); open({str(tmp_path / 'told')!r}, 'w'); time.sleep(900)"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(short)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert starter.stdout is not None
    server, worker = (psutil.Process(int(pid)) for pid in starter.stdout.readline().split())
    try:
        server.wait(timeout=120)
        assert worker.is_running()
        assert list(short.iterdir()) == [], "nothing is left of it"
    finally:
        worker.kill()
        starter.communicate()


def test_ray_has_the_script_that_stands_in_for_its_own() -> None:
    ray = importlib.util.find_spec("ray")

    assert ray and ray.origin
    assert (Path(ray.origin).parent / "_private/workers/setup_worker.py").exists()


LAST = "tests.unit.cluster.remote.test_fork_server:import_last"
ANSWER = "tests.unit.cluster.remote.test_fork_server:answer"


WHEN_TOLD = "tests.unit.cluster.remote.test_fork_server:import_little_when_told"


@pytest.fixture
def may_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Once this file is there, the server's first imports end: a question that was asked before comes in time."""
    monkeypatch.setenv("MAY_SERVE", str(tmp_path / "may_serve"))
    return tmp_path / "may_serve"


def test_a_question_is_answered_between_two_imports_and_the_server_serves_afterwards(ask: Ask, may_serve: Path) -> None:
    with fork_server(WHEN_TOLD, LAST) as server:
        server.ask(ANSWER, "what is there?")
        may_serve.touch()

        assert server.answer() == "what is there?: True False 1"
        assert (
            ask(f"import sys; print({IMPORTED!r} in sys.modules, '_imported_last' in sys.modules)").stdout
            == "True True\n"
        )


def test_a_question_that_fails_has_no_answer_and_costs_no_server(
    ask: Ask, may_serve: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    with fork_server(WHEN_TOLD, LAST) as server:
        server.ask("tests.unit.cluster.remote.test_fork_server:fail_to_answer", "what")
        may_serve.touch()

        assert server.answer() is None
        assert (tmp_path / "asked").read_text() == "what", "else it came too late to fail"
        assert ask("print('forked')").stdout == "forked\n"


def test_a_question_that_comes_late_has_no_answer_and_costs_no_server(ask: Ask) -> None:
    with fork_server(LITTLE) as server:
        assert ask("print('forked')").stdout == "forked\n", "it serves"
        server.ask(ANSWER, "what")

        assert server.answer() is None
        assert ask("print('forked')").stdout == "forked\n"


def test_a_question_that_is_too_long_for_a_pipe_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAY_SERVE", str(tmp_path / "may_serve"))
    monkeypatch.setattr(fork_server_module, "_ANSWER_S", 1e9)
    with fork_server("tests.unit.cluster.remote.test_fork_server:import_until_told") as server:
        server.ask(ANSWER, "what" * 10_000)

        assert server.answer() is None, "and nobody waits for what it imports"


def test_a_server_that_has_ended_answers_nothing() -> None:
    with observed_server("tests.unit.cluster.remote.test_fork_server:fail_to_import") as (process, server):
        process.wait(timeout=60)
        server.ask(ANSWER, "what")

        assert server.answer() is None


def test_a_server_whose_starter_is_killed_with_a_question_open_leaves_nothing(tmp_path: Path, short: Path) -> None:
    program = f"""
import os
from cluster.remote.fork_server import fork_server
with fork_server("tests.unit.cluster.remote.test_fork_server:import_until_told") as server:
    server.ask({ANSWER!r}, "what")
    os.kill(os.getpid(), 9)
"""
    env = os.environ | {"TMPDIR": str(short), "MAY_SERVE": str(tmp_path / "may_serve")}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, check=False)
    (folder,) = short.iterdir()
    (tmp_path / "may_serve").touch()
    limit = time.monotonic() + 60
    while folder.exists() and time.monotonic() < limit:
        time.sleep(0.01)
    assert not folder.exists()
