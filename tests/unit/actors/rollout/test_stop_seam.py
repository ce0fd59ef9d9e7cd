"""Stop texts over the seam, on tokens that are a letter or a byte each."""

import pytest

from actors.rollout.stop_seam import StopSeam


def letters(token_ids) -> str:
    return "".join(map(chr, token_ids))


def utf8(token_ids) -> str:
    return bytes(token_ids).decode(errors="replace")


def place_of_end(kept: str, new: str, *stops: str, min_tokens: int = 0) -> int | None:
    """How many new letters the completion gets; None where no stop text ends it."""
    seam = StopSeam([*map(ord, kept)], stops=stops, min_tokens=min_tokens, decode=letters)
    for place, letter in enumerate(new, 1):
        if seam.ends([ord(letter)]):
            return place
        if seam.is_past:
            return None
    return None


@pytest.mark.parametrize(
    ("kept", "new", "place"),
    [
        ("one EN", "D two", 1),
        ("one E", "ND two", 2),
        ("E", "ND", 2),
        ("one E", "nd END", None),  # the engine's own: nothing of it is kept
        ("one", " two END", None),
    ],
)
def test_a_stop_text_that_begins_in_kept_tokens_ends_with_its_last_new_one(kept, new, place):
    assert place_of_end(kept, new, "END") == place


def test_any_of_several_stop_texts_ends_it():
    assert place_of_end("a long END OF", " TAL", "TAL", "END OF TALE", "OF T") == 2


def test_the_first_tokens_end_with_no_stop_text():
    assert place_of_end("E", "ND", "END", min_tokens=3) is None
    assert place_of_end("E", "ND", "END", min_tokens=2) == 2


def test_a_character_with_its_halves_on_both_sides_of_the_seam_is_one():
    whole = [*"…END".encode()]
    seam = StopSeam(whole[:2], stops=("…END",), min_tokens=0, decode=utf8)
    assert [seam.ends([token]) for token in whole[2:]] == [False, False, False, True]


def test_a_kept_beginning_may_have_several_tokens_for_each_of_its_characters():
    *kept, last = "ééé".encode()
    assert StopSeam(kept, stops=("ééé",), min_tokens=0, decode=utf8).ends([last])


def test_it_is_past_once_the_new_text_is_as_long_as_the_longest_stop_text():
    seam = StopSeam([*map(ord, "EN")], stops=("END", "."), min_tokens=0, decode=letters)
    assert [(seam.ends([ord(letter)]), seam.is_past) for letter in "xyz"] == [
        (False, False),
        (False, False),
        (False, True),
    ]
