from my_rewards import right, short


def test_the_answer_alone_is_right():
    assert right(completion=" 42 ", columns={"answer": "42"}) == 1.0
    assert right(completion="42", columns={"answer": 42}) == 1.0
    assert right(completion="42 or 43", columns={"answer": "42"}) == 0.0


def test_long_completions_are_not_short():
    assert short(completion="1234", most=4) == 1.0
    assert short(completion="12345", most=4) == 0.0
