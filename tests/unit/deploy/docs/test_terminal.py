from tests.pictures.terminal import FILE, svg


def test_the_picture_of_the_terminal_is_what_the_code_draws():
    assert FILE.read_text(encoding="utf-8") == svg(), (
        "run `python -m tests.pictures.terminal`, and look at what changed"
    )
