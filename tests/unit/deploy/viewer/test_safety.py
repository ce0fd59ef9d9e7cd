"""The viewer answers its own pages, and nobody else's."""

import contextlib
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from cluster.contracts.errors import ConfigError
from deploy.viewer import app as viewer
from tests.unit.deploy.viewer.run_files import write_run

TOKEN = "a-token-of-many-letters"


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def _browser(run, *, base_url: str = "http://127.0.0.1:8000", **options) -> TestClient:
    return TestClient(viewer.create_app([str(run)], **options), base_url=base_url, follow_redirects=False)


def test_a_name_that_was_not_trusted_is_refused_even_if_it_resolves_to_this_machine(run):
    browser = _browser(run)
    assert browser.get("/runs").status_code == 200
    assert browser.get("/runs", headers={"Host": "localhost:9"}).status_code == 200
    assert browser.get("/runs", headers={"Host": "[::1]:9"}).status_code == 200
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "", "a b"):
        assert browser.get("/runs", headers={"Host": host}).status_code == 421, host
    assert _browser(run, hosts=["RUNS.example"]).get("/runs", headers={"Host": "Runs.example"}).status_code == 200


def test_another_sites_page_reads_nothing(run):
    browser = _browser(run)
    assert browser.get("/runs.json", headers={"Origin": "http://evil.example"}).status_code == 403
    assert browser.get("/runs.json", headers={"Origin": "null"}).status_code == 403
    assert browser.get("/runs.json", headers={"Origin": "http://127.0.0.1:9999"}).status_code == 403, (
        "another port is another site"
    )
    assert browser.get("/runs.json", headers={"Origin": "http://127.0.0.1:8000"}).status_code == 200
    assert (
        browser.get(
            "/static/style.css", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
        ).status_code
        == 403
    )
    followed_a_link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert browser.get("/runs", headers=followed_a_link).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_but_reading_is_answered(run, method):
    answer = _browser(run).request(method, "/runs")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert _browser(run).head("/runs").status_code == 200


def test_with_a_token_the_printed_url_works_once_and_then_the_cookie(run):
    browser = _browser(run, token=TOKEN)
    for path in (
        "/",
        "/runs",
        "/run/run/",
        "/run/run/live",
        "/static/style.css",
        "/runs.json?token=wrong",
        "/runs?token=",
    ):
        assert browser.get(path).status_code == 401, path
    login = browser.get(f"/runs?token={TOKEN}&sort=reward")
    assert (login.status_code, login.headers["location"]) == (303, "/runs?sort=reward")
    cookie = login.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Path=/" in cookie
    assert TOKEN not in cookie
    assert browser.get("/runs").status_code == 200, "the client keeps the cookie"
    assert (
        _browser(run, token=TOKEN, base_url="https://127.0.0.1")
        .get(f"/?token={TOKEN}")
        .headers["set-cookie"]
        .count("Secure")
        == 1
    )


def test_the_cookie_counts_among_those_of_other_programs_on_this_machine_whatever_they_are(run):
    browser = _browser(run, token=TOKEN)
    cookie = browser.get(f"/runs?token={TOKEN}").headers["set-cookie"].partition(";")[0]
    browser.cookies.clear()
    others = 'theme={"dark": true}; caf\u00e9=1; {=}'
    assert browser.get("/runs", headers={"Cookie": f"{others}; {cookie}".encode()}).status_code == 200
    assert browser.get("/runs", headers={"Cookie": others.encode()}).status_code == 401


def test_below_a_prefix_the_cookie_is_sent_to_no_other_program_of_the_host(run):
    login = _browser(run, token=TOKEN, root_path="/treadwheel").get(f"/treadwheel/runs?token={TOKEN}")
    assert login.status_code == 303 and "Path=/treadwheel;" in login.headers["set-cookie"]


@pytest.mark.parametrize("root_path", ["treadwheel", "/run/mine", "/static"])
def test_a_prefix_that_no_url_could_have_is_refused(run, root_path):
    with pytest.raises(ConfigError, match="must begin with '/', and not with /run or /static"):
        viewer.create_app([str(run)], root_path=root_path)


def test_a_script_gets_errors_as_json(run):
    assert _browser(run).get("/run/other/index.json").json()["error"].startswith("there is no run 'other'")


def test_a_run_that_cannot_be_read_is_told_in_a_sentence(run):
    (run / "events.jsonl").write_text("no JSON\n")
    answer = _browser(run).get("/run/run/")
    assert answer.status_code == 500 and "has a line that is not JSON" in answer.text


def test_a_script_brings_the_token_as_a_bearer(run):
    browser = _browser(run, token=TOKEN)
    assert browser.get("/runs.json", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert browser.get("/runs.json", headers={"Authorization": "Bearer wrong"}).status_code == 401


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/..%2fapp.py",
        "/static/%2e%2e/app.py",
        "/static//etc/passwd",
        "/run/..%2f..%2fetc/",
        "/run/%2e%2e/",
        "/run/other/",
        "/run/run/../../other/",
    ],
)
def test_nothing_beside_the_named_runs_is_read(tmp_path, run, path):
    write_run(tmp_path / "other")
    assert _browser(run).get(path).status_code in (404, 405)


def test_every_answer_says_what_a_browser_may_do_with_it(run):
    browser = _browser(run)
    for path in ("/runs", "/runs.json", "/run/run/", "/run/nothing/", "/static/style.css", "/run/run/../x"):
        headers = browser.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    assert "content-security-policy" in browser.get("/runs", headers={"Host": "evil.example"}).headers


def test_links_begin_with_the_prefix_of_the_proxy_and_with_no_other(run):
    browser = _browser(run)
    page = browser.get("/runs", headers={"X-Forwarded-Prefix": "/treadwheel/"}).text
    assert 'href="/treadwheel/static/style.css"' in page and 'href="/treadwheel/run/run/"' in page
    for hostile in ("//evil.example", "https://evil.example", '/a" onload="b', "/a b"):
        assert "evil" not in browser.get("/runs", headers={"X-Forwarded-Prefix": hostile}).text
        assert 'href="/static/style.css"' in browser.get("/runs", headers={"X-Forwarded-Prefix": hostile}).text
    told = _browser(run, root_path="/treadwheel")
    assert 'href="/treadwheel/run/run/"' in told.get("/treadwheel/runs").text, "a proxy may pass the prefix on"
    assert 'href="/treadwheel/run/run/"' in told.get("/runs").text, "or take it off"


def test_beyond_this_machine_it_makes_a_token_and_wants_a_name(run):
    with pytest.raises(ConfigError, match="--trusted-host"):
        viewer.serve([str(run)], host="0.0.0.0", port=0, trusted_hosts=[], token=None, root_path="", says=print)

    class Said(Exception): ...

    def says(line: str) -> None:
        raise Said(line)

    with pytest.raises(Said, match=r"^viewing on http://runs\.example:\d+/\?token=[\w-]{32}$"):
        viewer.serve(
            [str(run)], host="0.0.0.0", port=0, trusted_hosts=["runs.example"], token=None, root_path="", says=says
        )
    with pytest.raises(Said, match=r"^viewing on http://runs\.example:\d+/$"):
        viewer.serve(
            [str(run)], host="0.0.0.0", port=0, trusted_hosts=["runs.example"], token=TOKEN, root_path="", says=says
        )
    with pytest.raises(Said, match=r"^viewing on http://127\.0\.0\.1:\d+/$"):
        viewer.serve([str(run)], host="127.0.0.1", port=0, trusted_hosts=[], token=None, root_path="", says=says)
    # With the slash that nginx's `location` has; "/proxied//" is no page.
    with pytest.raises(Said, match=r"^viewing on http://127\.0\.0\.1:\d+/proxied/$"):
        viewer.serve(
            [str(run)], host="127.0.0.1", port=0, trusted_hosts=[], token=None, root_path="/proxied/", says=says
        )


def test_an_address_that_other_machines_reach_is_trusted_and_gets_a_token(run, monkeypatch):
    """192.0.2.7 is of a network that is kept for documentation."""
    made: dict[str, object] = {}

    class Bound(Exception): ...

    def says(line: str) -> None:
        raise Bound(line)

    listening = SimpleNamespace(getsockname=lambda: ("192.0.2.7", 80))
    monkeypatch.setattr(viewer, "bound", lambda *_: contextlib.nullcontext(listening))
    monkeypatch.setattr(viewer, "create_app", lambda roots, **options: made.update(options))
    with pytest.raises(Bound) as told:
        viewer.serve([str(run)], host="192.0.2.7", port=80, trusted_hosts=[], token=None, root_path="", says=says)
    assert (made["hosts"], str(told.value)) == (["192.0.2.7"], f"viewing on http://192.0.2.7:80/?token={made['token']}")


@pytest.mark.parametrize("name", ["runs.example:8443", "https://runs.example", "runs.example/treadwheel", ""])
def test_a_trusted_host_is_a_name_alone_since_no_request_would_have_another(run, name):
    with pytest.raises(
        ConfigError, match=f"--trusted-host {name!r} is not a host name: leave out scheme, port and path"
    ):
        viewer.serve([str(run)], host="127.0.0.1", port=0, trusted_hosts=[name], token=None, root_path="", says=print)


def test_a_token_is_read_without_the_line_end_that_a_file_of_secrets_has(run, monkeypatch):
    monkeypatch.setenv("VIEW_TOKEN", f"{TOKEN}\n")
    browser = _browser(run, token=viewer.token_of("VIEW_TOKEN"))
    assert browser.get("/runs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    monkeypatch.setenv("VIEW_TOKEN", " \n")
    with pytest.raises(ConfigError, match="VIEW_TOKEN"):
        viewer.token_of("VIEW_TOKEN")


def test_a_token_that_the_environment_lacks_is_a_mistake(monkeypatch):
    monkeypatch.delenv("VIEW_TOKEN", raising=False)
    assert viewer.token_of(None) is None
    with pytest.raises(ConfigError, match="VIEW_TOKEN"):
        viewer.token_of("VIEW_TOKEN")


def test_a_folder_that_is_missing_is_told_at_once(tmp_path):
    with pytest.raises(ConfigError, match="name a run directory"):
        viewer.create_app([str(tmp_path / "nothing")])


def test_a_script_is_asked_for_anew_and_sent_again_only_where_it_changed(run):
    browser = _browser(run)
    first = browser.get("/static/curves.js")
    assert first.headers["cache-control"] == "no-cache"
    again = browser.get("/static/curves.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.headers["cache-control"], again.content) == (304, "no-cache", b"")
    assert browser.get("/runs").headers["cache-control"] == "no-store"
