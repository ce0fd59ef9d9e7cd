"""A prompt of a user's own source is looked at before it travels: what is wrong with it would restart workers later."""

import math
from dataclasses import replace

import pytest

from cluster.contracts.errors import DataError
from cluster.contracts.own_prompts import prompt_at
from cluster.contracts.types import Prompt

GOOD = Prompt(prompt_id="mine/0", messages=[{"role": "user", "content": "1 + 1 ="}], columns={"answer": "2"})


def test_a_good_prompt_is_what_the_source_gave():
    assert prompt_at([GOOD], 0) is GOOD


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ({"prompt": "2+2="}, "prompt 0 is of type dict; it must be a cluster.contracts.types.Prompt"),
        (None, "prompt 0 is of type NoneType"),
        (replace(GOOD, prompt_id=7), "prompt 0: prompt_id=7 must be a text"),
        (replace(GOOD, messages="2 + 2 ="), "prompt 0: messages='2 \\+ 2 =' must be a list"),
        (replace(GOOD, messages=None), "prompt 0: messages=None must be a list, or text=None a text"),
        (replace(GOOD, columns={"level": {1, 2}}), "prompt 0: level={1, 2} has no JSON"),
        (replace(GOOD, columns={"level": math.nan}), "prompt 0: level=nan has no JSON"),
        (replace(GOOD, columns={"note": "bad \ud800 text"}), "prompt 0: note='bad .*' has no JSON .*surrogates"),
        (replace(GOOD, messages=[{"role": "user", "content": "\udcff"}]), "prompt 0: messages=.* has no JSON"),
    ],
)
def test_what_a_worker_could_not_send_on_is_refused_by_name(prompt, why):
    with pytest.raises(DataError, match=why):
        prompt_at([prompt], 0)


class Corrupt:
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Prompt:
        raise KeyError("the row is corrupt")


def test_an_error_of_the_source_names_the_prompt_and_the_users_line():
    with pytest.raises(DataError, match=r"prompt 3 cannot be read: KeyError: 'the row is corrupt' \(test_own_prompts"):
        prompt_at(Corrupt(), 3)
