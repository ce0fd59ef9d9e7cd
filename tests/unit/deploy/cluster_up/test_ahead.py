"""A local Ray that starts while its run is still checked: with stand-ins for Ray's start and end."""

import contextlib
import gc
import os
import signal
import threading
import time

import pytest
import ray

from cluster.contracts.errors import ConfigError
from cluster.remote import fork_server
from deploy.cluster_up import ahead as ahead_of_checks
from deploy.cluster_up.ahead import RayAhead
from deploy.cluster_up.connection import connected
from tests.fakes import run_config


class ScriptedRay:
    """Comes up when it may, and remembers in which order what was asked of it, with the token mode that it found."""

    def __init__(self) -> None:
        self.may_come_up = threading.Event()
        self.asked: list[tuple[str, str | None]] = []
        self.error: Exception | None = None
        self.is_late = False
        """It came up since its time was over, not since it was let."""

    def init(self, *_: object, **__: object) -> None:
        self.is_late = not self.may_come_up.wait(60)
        self.asked.append(("init", os.environ.get("RAY_AUTH_MODE")))
        if self.error is not None:
            raise self.error

    def shutdown(self) -> None:
        self.asked.append(("shutdown", os.environ.get("RAY_AUTH_MODE")))


@pytest.fixture
def scripted(monkeypatch) -> ScriptedRay:
    scripted = ScriptedRay()
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ray, "init", scripted.init)
    monkeypatch.setattr(ray, "shutdown", scripted.shutdown)
    return scripted


async def test_a_run_takes_the_ray_that_comes_up_already_and_ends_it(scripted):
    with RayAhead(None) as ahead:
        ahead.start()
        assert scripted.asked == [], "nobody waits for it yet"
        scripted.may_come_up.set()
        async with connected(None, ahead=ahead):
            assert scripted.asked == [("init", "token")]
        assert scripted.asked[1:] == [("shutdown", "token")]
    assert "RAY_AUTH_MODE" not in os.environ


async def test_what_is_garbage_goes_before_ray_does_and_not_meanwhile(scripted, monkeypatch):
    class Ref:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            scripted.asked.append(("dropped", None))

    monkeypatch.setattr(ray, "shutdown", lambda: scripted.asked.append(("collects", str(gc.isenabled()))))
    scripted.may_come_up.set()
    async with connected(None):
        Ref()
    assert scripted.asked == [("init", "token"), ("dropped", None), ("collects", "False")]
    assert gc.isenabled()


async def test_a_ray_that_was_not_begun_is_started_by_the_run(scripted):
    scripted.may_come_up.set()
    with RayAhead(None) as ahead:
        async with connected(None, ahead=ahead):
            assert scripted.asked == [("init", "token")]
    assert scripted.asked == [("init", "token"), ("shutdown", "token")]


def test_a_refused_run_raises_its_own_error_and_leaves_no_ray(scripted):
    with pytest.raises(ConfigError, match="refused"), RayAhead(None) as ahead:
        ahead.start()
        scripted.error = RuntimeError("it would not have come up")
        scripted.may_come_up.set()
        raise ConfigError("refused")
    assert scripted.asked == [("init", "token"), ("shutdown", "token")], "it ends after its start, and with its token"
    assert "RAY_AUTH_MODE" not in os.environ


def test_more_presses_of_ctrl_c_do_not_leave_a_ray_that_still_starts(scripted):
    main, ends = threading.get_ident(), threading.Event()

    def press_and_let_it_come_up() -> None:
        ends.wait(60)
        for _ in range(3):
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.1)  # else several presses could be one
        scripted.may_come_up.set()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test session in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt), RayAhead(None) as ahead:
            ahead.start()
            ahead._imports.callback(ends.set)  # the first thing that ends
            threading.Thread(target=press_and_let_it_come_up).start()
            raise KeyboardInterrupt
        assert scripted.asked == [("init", "token"), ("shutdown", "token")]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_that_tries_again_has_one_ray(scripted):
    scripted.may_come_up.set()
    with RayAhead(None) as ahead:
        for _ in range(2):
            ahead.start()
    assert [name for name, _ in scripted.asked] == ["init", "shutdown"]


async def test_a_ray_that_does_not_come_up_ends_the_run_that_wanted_it(scripted):
    scripted.error = RuntimeError("no room on the disk")
    scripted.may_come_up.set()
    with RayAhead(None) as ahead:
        ahead.start()
        with pytest.raises(RuntimeError, match="no room on the disk"):
            async with connected(None, ahead=ahead):
                pass


@pytest.mark.parametrize(("address", "variable"), [("10.0.0.1:6379", None), (None, "10.0.0.1:6379")])
def test_a_run_on_a_cluster_that_is_there_starts_none(address, variable, scripted, monkeypatch):
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    with RayAhead(address) as ahead:
        ahead.start()
        assert not ahead.is_coming
    assert scripted.asked == []


def test_an_empty_address_of_a_cluster_counts_as_unset(scripted, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "")
    scripted.may_come_up.set()
    with RayAhead(None) as ahead:
        ahead.start()
        assert ahead.is_coming
    assert [name for name, _ in scripted.asked] == ["init", "shutdown"]


@pytest.mark.parametrize("variable", [None, ""])
@pytest.mark.parametrize(
    ("address", "settings", "imports"),
    [
        (None, {}, True),
        ("ray://elsewhere:10001", {}, False),
        (None, {"learner": {"compile": True}}, False),
        (None, {"rollout": {"enforce_eager": False}}, False),
    ],
    ids=["own Ray", "another's Ray", "compiled learner", "compiled engine"],
)
def test_what_actors_need_is_imported_ahead_where_they_can_be_forked(
    address, settings, imports, variable, scripted, monkeypatch
):
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    served = []

    @contextlib.contextmanager
    def server(*what):
        served.append(what)
        yield

    monkeypatch.setattr(fork_server, "fork_server", server)
    monkeypatch.setattr(ahead_of_checks, "_can_fork", lambda: True)
    with RayAhead(address) as ahead:
        ahead.import_for(run_config(**settings))
        ahead.import_for(run_config(**settings))

    assert len(served) == imports, "once"


def test_nothing_is_imported_ahead_where_another_process_has(scripted, monkeypatch):
    monkeypatch.setattr(ahead_of_checks, "_can_fork", lambda: True)
    monkeypatch.setenv("TREADWHEEL_FORK_SERVER", "its socket")
    with RayAhead(None) as ahead:
        ahead.import_for(run_config())

        assert os.environ["TREADWHEEL_FORK_SERVER"] == "its socket" and ahead.ask("a.module:function", "what")() is None


def test_what_imports_ends_before_a_starting_ray_that_waits_for_it(scripted, monkeypatch):
    @contextlib.contextmanager
    def server(*imports):
        yield
        scripted.may_come_up.set()

    monkeypatch.setattr(fork_server, "fork_server", server)
    monkeypatch.setattr(ahead_of_checks, "_can_fork", lambda: True)
    with RayAhead(None) as ahead:
        ahead.import_for(run_config())
        ahead.start()
        assert scripted.asked == []
    assert scripted.asked == [("init", "token"), ("shutdown", "token")] and not scripted.is_late


def test_a_machine_without_a_socket_for_the_imports_goes_on_without(scripted, monkeypatch):
    @contextlib.contextmanager
    def server(*imports):
        raise OSError("no socket")
        yield

    monkeypatch.setattr(fork_server, "fork_server", server)
    monkeypatch.setattr(ahead_of_checks, "_can_fork", lambda: True)
    with RayAhead(None) as ahead:
        ahead.import_for(run_config())
        assert ahead.ask("a.module:function", "what")() is None


@pytest.mark.parametrize("asks", [True, False], ids=["a server", "none"])
def test_a_question_goes_to_the_process_that_imports_where_there_is_one(asks, scripted, monkeypatch):
    class Server:
        def ask(self, function, question):
            self.asked = (function, question)

        def answer(self):
            return " ".join(("to", *self.asked))

    monkeypatch.setattr(fork_server, "fork_server", lambda *imports: contextlib.nullcontext(Server()))
    monkeypatch.setattr(ahead_of_checks, "_can_fork", lambda: asks)
    with RayAhead(None) as ahead:
        ahead.import_for(run_config())
        answer = ahead.ask("a.module:function", "what")

        assert answer() == ("to a.module:function what" if asks else None)
