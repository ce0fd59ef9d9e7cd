"""The viewer in a real browser: a page that lives, behind a proxy, for a keyboard, and for runs of ten thousand steps."""

import contextlib
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from cluster.record.run_directory import RunDirectory
from tests.integration.browser import NAMELESS, PATIENCE_MS, debian, looking, screenshot, viewing
from tests.integration.faults import Run, until, write_run
from tests.models import make_tiny_model
from tests.ports import free_ports
from tests.unit.deploy.viewer import run_files
from tests.unit.deploy.viewer.run_files import append, event, step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ACTORS = {"rollout-0": 100, "rollout-1": 101, "learner-0": 200}
STARTED = event("started", 1000.5, actors=ACTORS)
DIED = event(
    "failure", 1003.0, actor="rollout-1", failure="death", reason="signal 9", actor_pid=101, decision="restart"
)
HEALED = event("recovery", 1009.0, actor="rollout-1", actor_pid=300, seconds=6.0)


@pytest.fixture
def live(tmp_path) -> Iterator[Path]:
    """A run of three steps whose driver lives: this process."""
    folder = run_files.write_run(tmp_path / "run", steps=[_step(number) for number in (1, 2, 3)], events=[STARTED])
    directory = RunDirectory(str(folder))
    text = (folder / "run.yaml").read_text()
    directory.claim(text)
    yield folder
    directory.release()


def test_a_page_grows_while_it_is_open(browser, live):
    with viewing(live) as (url, _), looking(browser, url) as page:
        expect(page.locator("#step")).to_have_text("Step 3")
        expect(page.locator("#state")).to_have_text("running")
        page.evaluate("window.isTheSame = true")
        before = _points(page)
        append(live / "metrics.jsonl", [_step(4), _step(5)])
        expect(page.locator("#step")).to_have_text("Step 5")
        assert _points(page) == before + 2
        append(live / "events.jsonl", [DIED])
        expect(page.locator("[data-actor='rollout-1']")).to_have_attribute("data-state", "dead")
        red = _color(page, "rollout-1")
        append(live / "events.jsonl", [HEALED])
        expect(page.locator("[data-actor='rollout-1']")).to_have_attribute("data-state", "healthy")
        assert _color(page, "rollout-1") != red
        expect(page.locator("#events")).to_contain_text("rollout-1 serves again after 6.0 s")
        append(live / "metrics.jsonl", [{**_step(6), "eval/accuracy": 0.5}])
        expect(page.get_by_role("button", name="held-out accuracy")).to_be_visible()
        assert page.evaluate("window.isTheSame"), "the page was never loaded again"


def test_a_page_says_that_its_run_ended_and_that_the_viewer_went_away(browser, tmp_path):
    run = run_files.write_run(tmp_path / "run", steps=[_step(1)], events=[STARTED])
    with viewing(run) as (url, viewer):
        context = browser.new_context()
        page = context.new_page()
        page.goto(url)
        expect(page.locator("#state")).to_have_text("killed")
        append(run / "events.jsonl", [event("finished", 1010.0)])
        expect(page.locator("#state")).to_have_text("finished")
        viewer.terminate()
        assert viewer.exit_code() == 0
        expect(page.locator("#state")).to_have_text("viewer does not answer")
        context.close()


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.exhaustive
def test_a_real_worker_that_is_killed_is_seen_to_serve_again_and_its_death_stays(browser, tmp_path):
    file = write_run(tmp_path, make_tiny_model(tmp_path / "model"), num_steps=100_000, deterministic=False)
    run = Run(tmp_path / "run")
    with run.start(file) as driver:
        until(lambda: run.num_steps() >= 2, process=driver)
        with viewing(run.path) as (url, _), looking(browser, url) as page:
            worker = page.locator("[data-actor='rollout-0']")
            expect(worker).to_have_attribute("data-state", "healthy")
            reached = run.num_steps()
            run.strike("rollout-0", signal.SIGKILL)
            # It may be red for less than a second: nobody waits for that.
            expect(worker).to_contain_text("restarted 1×", timeout=3 * PATIENCE_MS)
            expect(worker).to_have_attribute("data-state", "healthy")
            screenshot(page, "overview-restarted-worker")
            page.wait_for_function(
                "reached => Number(document.querySelector('#progress').value) > reached", arg=reached
            )
            page.get_by_role("link", name="Actors").click()
            expect(page.locator("#actors [data-actor='rollout-0']")).to_have_text("healthy")
            expect(page.locator("#gantt .life.dead").first).to_be_visible()
            screenshot(page, "actors-live")


def test_behind_nginx_below_a_prefix_pages_are_whole_and_events_are_not_held_back(browser, live, tmp_path):
    with (
        viewing(live) as (upstream, _),
        _nginx(tmp_path, upstream) as url,
        looking(browser, f"{url}/treadwheel/") as page,
    ):
        expect(page).to_have_url(f"{url}/treadwheel/run/run/")
        expect(page.locator("#step")).to_have_text("Step 3")
        append(live / "metrics.jsonl", [_step(4)])
        expect(page.locator("#step")).to_have_text("Step 4")
        for name in ("Actors", "Weights", "Overview"):
            page.get_by_role("navigation").get_by_role("link", name=name).click()
            expect(page.get_by_role("navigation").get_by_role("link", name=name)).to_have_attribute(
                "aria-current", "page"
            )
        expect(page.locator("#step")).to_have_text("Step 4")


def test_beyond_this_machine_the_printed_url_lets_in_and_no_other(browser, live):
    with viewing(live, "--host", "0.0.0.0", "--trusted-host", "localhost") as (url, _):
        assert httpx.get(url.partition("?")[0], timeout=120).status_code == 401
        with looking(browser, url) as page:
            expect(page.locator("#step")).to_have_text("Step 3")
            assert "token" not in page.url
            append(live / "metrics.jsonl", [_step(4)])
            expect(page.locator("#step")).to_have_text("Step 4")
            assert page.evaluate("document.cookie") == ""


def test_keys_reach_everything_and_everything_has_a_name(browser, live):
    with viewing(live) as (url, _), looking(browser, url) as page:
        expect(page.locator("#step")).to_have_text("Step 3")
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        page.get_by_role("img", name="Reward").focus()
        page.keyboard.press("End")
        page.keyboard.press("ArrowLeft")
        expect(page.locator("figure", has_text="Reward").first.locator("output")).to_have_text("step 2, sampled, 0.25")
        switch = page.get_by_role("button", name="Colours: as the system")
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        switch.press("Enter")
        page.get_by_role("button", name="Colours: light").press("Enter")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
        page.reload()
        expect(page.get_by_role("button", name="Colours: dark")).to_be_visible()
        for path in _pages():
            page.goto(f"{url}{path}")
            assert page.evaluate(NAMELESS) == [], path


def test_a_curve_has_its_name_before_it_is_drawn(browser, live):
    with viewing(live) as (url, _), looking(browser, url) as page:
        page.add_init_script("window.ResizeObserver = class { observe() {} }")
        page.reload()
        expect(page.get_by_role("img", name="Reward")).to_have_attribute("aria-label", re.compile("0.375 at step 3"))
        assert page.evaluate(NAMELESS) == []


def test_every_page_fits_a_telephone_and_a_desk(browser, tmp_path):
    for name in ("first", "second"):
        events = [
            STARTED,
            DIED,
            HEALED,
            *(event("broadcast", 1000.0 + at, policy_version=at, digest="d" * 64, num_workers=2) for at in range(40)),
        ]
        run = run_files.write_run(tmp_path / name, steps=[_step(at) for at in range(1, 60)], events=events)
        append(run / "phases.jsonl", [_phase(actor, at) for at in range(60) for actor in ACTORS])
    with viewing(tmp_path) as (url, _):
        for width, scheme in ((390, "dark"), (1280, "light")):
            with looking(browser, url, width=width, scheme=scheme) as page:
                for path in (
                    "runs",
                    "compare?run=first&run=second",
                    *(each.replace("run/run", "run/first") for each in _pages()),
                ):
                    page.goto(f"{url}{path}")
                    page.wait_for_load_state("load")
                    name = path.partition("?")[0].strip("/").replace("run/first", "overview").replace("overview/", "")
                    screenshot(page, f"{name}-{width}")
                    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                    assert wide <= 0, f"{path} is {wide} px wider than {width}"


def test_of_ten_thousand_steps_a_few_hundred_points_are_drawn(browser, tmp_path):
    others = {f"learner/number_{index}": index / 7 for index in range(60)}
    many = [{**_step(at), **others, "reward/mean": 99.0 if at == 4321 else 0.5} for at in range(1, 10_001)]
    sent = [event("broadcast", 1000.0 + at, policy_version=at, digest="d" * 64, num_workers=2) for at in range(10_000)]
    run = run_files.write_run(tmp_path / "run", steps=many, events=[STARTED, *sent])
    with viewing(run) as (url, _), looking(browser, url) as page:
        expect(page.locator("figure svg path").first).to_be_visible()
        assert 100 < _points(page) <= 800
        axis = page.locator("figure").first.locator("svg text").all_text_contents()
        assert "100" in axis, "there is room for the spike"
        assert len(page.content()) < 1_000_000, "26 MB are in the run's files"


def _pages() -> list[str]:
    return ["run/run/", "run/run/actors", "run/run/weights"]


def _step(number: int) -> dict:
    return step(
        number,
        reward__mean=number / 8,
        time__step_s=1.0,
        staleness__max=1.0,
        learner__entropy_mean=1.0,
        weights__canary_error=1e-6,
    )


def _phase(actor: str, at: int) -> dict:
    name = "learning" if actor.startswith("learner") else "sampling"
    return {"actor": actor, "phase": name, "start": 1000.0 + at, "end": 1000.6 + at, "step": at}


def _points(page: Page) -> int:
    """Of the first line of the first panel."""
    return page.locator("figure svg path[class^='series']").first.get_attribute("d").count("L") + 1  # pyright: ignore


def _color(page: Page, actor: str) -> str:
    return page.locator(f"[data-actor='{actor}'] i").evaluate("each => getComputedStyle(each).backgroundColor")


@contextlib.contextmanager
def _nginx(folder: Path, upstream: str) -> Iterator[str]:
    """nginx below /treadwheel/ before `upstream`, with its settings as they come: it buffers what it is not told not to."""
    (port,) = free_ports(1)
    paths = " ".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    file = folder / "nginx.conf"
    file.write_text(f"""
        daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
        events {{}}
        http {{
            access_log off; {paths}
            server {{
                listen 127.0.0.1:{port};
                location /treadwheel/ {{
                    proxy_pass {upstream};
                    proxy_set_header Host $http_host;
                    proxy_set_header X-Forwarded-Prefix /treadwheel;
                }}
            }}
        }}""")
    process = subprocess.Popen([debian("nginx"), "-c", str(file)], stderr=subprocess.DEVNULL)
    try:
        until(lambda: _listens(port) or process.poll() is not None)
        assert process.poll() is None, (folder / "nginx.log").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    except OSError:
        return False
    return True
