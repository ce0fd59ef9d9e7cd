import pytest

from actors.prompts.repeat import RepeatedPrompts
from cluster.contracts.errors import ConfigError
from cluster.contracts.plugins import Plugin, prompt_source


def test_every_prompt_is_the_same_message_under_its_own_id():
    source = RepeatedPrompts(message="Guess.", size=3)
    prompts = [source[index] for index in range(len(source))]
    assert [prompt.prompt_id for prompt in prompts] == ["repeat/0", "repeat/1", "repeat/2"]
    assert all(prompt.messages == [{"role": "user", "content": "Guess."}] for prompt in prompts)
    assert all(prompt.text is None and prompt.columns == {} for prompt in prompts)
    with pytest.raises(IndexError):
        source[3]


def test_a_system_prompt_goes_first():
    prompt = RepeatedPrompts(message="Guess.", system_prompt="You play.")[0]
    assert [(each["role"], each["content"]) for each in prompt.messages or []] == [
        ("system", "You play."),
        ("user", "Guess."),
    ]


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"message": " "}, r"message=' ' says nothing"),
        ({"message": "x", "size": 0}, r"prompts\.size=0"),
        ({"size": 3}, "needs message"),
        ({"message": "x", "times": 3}, r"prompts\.times=3 is not a parameter"),
    ],
)
def test_wrong_parameters_are_refused(params, why):
    with pytest.raises(ConfigError, match=why):
        prompt_source(Plugin(name="repeat", params=params), field="prompts")
