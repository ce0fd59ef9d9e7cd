"""Numbers of the shipped rules, worked out by hand."""

import asyncio
import time
from functools import partial

import numpy as np
import pytest
import torch

from actors.returned import to_reward
from actors.rewards.exact_match import exact_match
from actors.rewards.format import format
from actors.rewards.json_schema import json_schema
from actors.rewards.language_consistency import language_consistency
from actors.rewards.length import length
from actors.rewards.math_verify import math_verify
from actors.rewards.multiple_choice import multiple_choice
from actors.rewards.ngram_repetition import ngram_repetition
from actors.rewards.openrlhf import OpenRlhfReward
from actors.rewards.regex import regex
from actors.rewards.verl import VerlReward
from actors.units import same_tail
from cluster.contracts.errors import ConfigError, DataError
from tests.models import make_tokenizer


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("B", 1.0),
        ("(b)", 0.0),  # a small letter alone is an article as often as a choice
        ("It is a trap: answer b", 1.0),
        ("The answer is **B**", 1.0),
        ("Not A. Not C. B", 1.0),
        ("B, no: the answer is A", 0.0),
        (r"The answer is A, so \boxed{B}", 1.0),
        ("B or perhaps C", 0.0),
        ("Z", 0.0),
        (r"\boxed{\text{(B)}}, for A is false", 1.0),
        ("The answer is a prime number: B", 1.0),
        ("<think>The answer is A? No.</think>\n\nB", 1.0),
        ("It may seem that the answer is A. It is not: the answer is option B.", 1.0),
        (r"One could say the answer is A. But the correct answer is $\textbf{B}$.", 1.0),
        (r"First I thought the answer is C, but the answer is \(\text{B}\).", 1.0),
        ("The answer is e^x, which is option B.", 1.0),
        ("I choose B. A whale is a mammal.", 1.0),
        ("Not B. A is right.", 0.0),
        (r"\boxed{b}", 1.0),
        (r"\boxed{\text{(b)}}", 1.0),
        (r"The answer is (B), that is \boxed{a + b}.", 1.0),
        (r"The answer is B: \boxed{e^x}", 1.0),
        (r"\boxed{B}, since \boxed{d = 4}", 1.0),
        ("The answer is B. Answer choice A is wrong because it ignores friction.", 1.0),
        ("The correct answer is B, while answer option D contradicts the text.", 1.0),
        ("The answer is B. The answer the A-team gave is wrong.", 1.0),
        ("B is too weak. A matches the text.", 0.0),
        ("A class of its own: B", 1.0),
        (r"\boxed{B, C}", 0.0),
        (r"\boxed{\text{(B) or (A)}}", 0.0),
        (r"\boxed{B}, A is wrong", 1.0),
        ("The answer is B or A", 0.0),
        ("The answer is **B**/**A**", 0.0),
        ("The answer is B, A is wrong and C as well", 1.0),
        ("The answer is B or 5 m", 1.0),
        ("The answer is 'B'. A is wrong.", 1.0),
        ("The answer is “B”. A is wrong.", 1.0),
        ("The answer is A's opposite: B", 1.0),
        ("The correct answer choice is B. (A is a distractor)", 1.0),
        ("Answer choice: B; A is wrong", 1.0),
        ("The answer would be B. Option A is not.", 1.0),
        ("The answer is therefore B, not A.", 1.0),
        ("The answer is clearly not A. It is B.", 1.0),
        ('{"answer": "B", "reason": "A is wrong"}', 1.0),
        ("The answer choice would be 'A', the answer is 'B' or 'A'", 0.0),
    ],
)
def test_the_choice_is_the_last_that_is_called_the_answer(said, reward):
    assert multiple_choice(completion=said, columns={"answer": "B"}) == reward
    assert multiple_choice(completion=said, columns={"answer": 1}) == reward, "by its place from 0"
    assert multiple_choice(completion=said, columns={"answer": "b"}, choices="abcde") == reward


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("答案是B。", 1.0),
        ("故选B。", 1.0),
        ("选项 A 不对，故选B。", 1.0),
        ("选项 B 不对，故选A。", 0.0),
        ("答案是B，因为A不对。", 1.0),
        ("答案：（B）。A 不对。", 1.0),
        ("正确答案为 B，不是 A。", 1.0),
        ("答案是A或B", 0.0),
        ("答えはBです", 1.0),
        ("正解は B です。A は違います。", 1.0),
        ("정답: B. A는 틀렸습니다.", 1.0),
        ("정답은 B입니다", 1.0),
        ("คำตอบคือBครับ", 1.0),
        (r"\boxed{B选项}", 1.0),
        ("所以answer is B。因为 A 不对。", 1.0),
        ("éB", 0.0),
        ("Bé", 0.0),
        ("ếB", 0.0),
        ("ΔB", 0.0),
        ("B_1", 0.0),
        ("AB", 0.0),
    ],
)
def test_a_choice_is_read_next_to_characters_of_scripts_without_spaces_but_not_inside_a_word(said, reward):
    assert multiple_choice(completion=said, columns={"answer": "B"}) == reward


@pytest.mark.parametrize("part", [r"\boxed{", r"\text{", "( ", "answer : * ( ", "answer is the ", " ", "\n", "A ", "a"])
def test_a_choice_in_a_long_text_is_found_in_time(part):
    """Ten thousand boxes in each other took minutes."""
    began = time.process_time()
    said = rf"\boxed{{{part * 20_000}"
    assert multiple_choice(completion=said, columns={"answer": "B"}) == 0.0
    assert multiple_choice(completion=said + "} answer" + part * 20_000, columns={"answer": "B"}) == 0.0
    assert time.process_time() - began < 5.0


def test_an_answer_that_is_no_choice_is_an_error():
    for answer in ("seven", "²"):
        with pytest.raises(DataError, match=f"'answer' is '{answer}'"):
            multiple_choice(completion="B", columns={"answer": answer})


@pytest.mark.parametrize("answer", [None, ["B"], {"letter": "B"}])
@pytest.mark.parametrize("judge", [exact_match, math_verify, multiple_choice, partial(regex, pattern="None|B")])
def test_an_answer_that_is_neither_text_nor_number_is_an_error_and_no_zero(judge, answer):
    given = {"completion": "None", "columns": {"answer": answer}}
    more = {"column": "answer"} | ({} if judge is multiple_choice else {"prompt": "?"})
    with pytest.raises(DataError, match=f"'answer' is .*, a {type(answer).__name__}; it must be a text or a number"):
        judge(**given, **more)


@pytest.mark.parametrize(
    ("said", "answer", "reward"),
    [
        (r"<think>\boxed{3}</think> \boxed{4}", 4, 1.0),
        (r"<think>\boxed{4}?</think> It is 5.", 4, 0.0),
        (r"So \boxed{18.90}.", r"\$18.90", 1.0),
        ("It is $5.", "$5$", 1.0),
        (r"<think>\boxed{4}", 4, 0.0),
        (r"It is 4. <think>Or \boxed{5}?", 4, 1.0),
    ],
)
def test_mathematics_is_read_after_the_reasoning_and_a_dollar_may_be_money(said, answer, reward):
    assert math_verify(prompt="?", completion=said, columns={"answer": answer}) == reward


@pytest.mark.parametrize("judge", [math_verify, multiple_choice])
@pytest.mark.parametrize(
    ("prompt", "said", "finish_reason", "reward"),
    [
        ("?<think>\n", r"\boxed{C}?", "length", 0.0),
        ("?<think>\n", r"\boxed{C}?</think>\boxed{B}", "length", 0.0),
        ("?<think>\n", r"\boxed{B}?</think>\boxed{C}", "length", 1.0),
        ("?", r"\boxed{C}", "length", 1.0),
        ("?<think>\n", r"\boxed{C}", "stop", 1.0),
    ],
)
def test_a_model_that_is_cut_off_in_the_reasoning_that_its_template_began_has_not_answered(
    judge, prompt, said, finish_reason, reward
):
    assert judge(prompt=prompt, completion=said, finish_reason=finish_reason, columns={"answer": "C"}) == reward


@pytest.mark.parametrize(
    ("said", "answer", "reward"),
    [
        (r"\boxed{3}? No: \boxed{4}", 4, 1.0),
        (r"\boxed{3}? No: \boxed{4}", 3, 0.0),
        (r"\boxed{4}? No: \boxed{}", 4, 0.0),
        (r"The final answer is $3$. Wait: \boxed{4}", 3, 0.0),
        (r"\boxed{3} and $\boxed{4}$", "3,4", 1.0),
        (r"\boxed{3}, \boxed{4} or \boxed{5}", 5, 0.0),  # all options
        (r"\boxed{3}\boxed{\boxed{4}}", 4, 1.0),
        (r"\boxed{4} and \boxed{5", 4, 1.0),
        (r"\fbox{4}", 4, 1.0),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", 1.0),
        (r"\boxed{1}" * 10_000 + r"\boxed{4}", 4, 1.0),
        (r"\boxed{" * 10_000, 4, 0.0),
    ],
)
def test_the_answer_is_the_last_box_with_those_that_are_joined_to_it(said, answer, reward):
    """Before, all boxes were one set, wherever they stood."""
    assert math_verify(prompt="?", completion=said, columns={"answer": answer}) == reward


@pytest.mark.parametrize(
    "said", ["10^{10^{10}}", "9^{9^{9^9}}", "10**10**10", "4+0*10^{10^9}", "999999!", "((9!)!)!", "2^{100001}"]
)
def test_a_number_that_no_machine_computes_is_a_wrong_answer(said):
    """Each but the last took the judge's whole deadline, and was a failed reward."""
    assert math_verify(prompt="", completion=f"\\boxed{{{said}}}", columns={"answer": "512"}) == 0.0


@pytest.mark.parametrize("said", [rf"\boxed{{{'1' * 30_000}}}", rf"\boxed{{4}}{' ' * 60_000}x \boxed{{5}}"])
def test_thousands_of_digits_or_spaces_are_read_once(said):
    """Each began the search anew."""
    began = time.process_time()
    assert math_verify(prompt="", completion=said, columns={"answer": "4"}) == 0.0
    assert time.process_time() - began < 4.0


@pytest.mark.parametrize("brackets", ["()", "{}", "[]"])
def test_an_answer_in_more_brackets_than_any_sane_one_is_wrong_and_not_parsed(brackets):
    """Thirty braces in one another took the judge's whole deadline, and were a failed reward."""
    opened, closed = brackets
    for number, reward in ((8, 1.0), (12, 0.0)):
        said = f"\\boxed{{{opened * number}4{closed * number}}}"
        assert math_verify(prompt="", completion=said, columns={"answer": "4"}) == reward
    assert math_verify(prompt="", completion=f"{'a) ' * 9}${'(' * 13}4{')' * 13}$", columns={"answer": "4"}) == 0.0
    assert math_verify(prompt="", completion="[0, 1[ or\n" * 13 + "It is $4$.", columns={"answer": "4"}) == 1.0


@pytest.mark.parametrize("said", ["2^{3^{2}}", "2^9", "5! + 392", "2^{10} - 2^{3^{2}}", "512 + 0*10^{1000}"])
def test_powers_and_factorials_are_computed(said):
    assert math_verify(prompt="", completion=f"\\boxed{{{said}}}", columns={"answer": "512"}) == 1.0


@pytest.mark.parametrize("answer", ["2 1/2", "5/2", "2.5"])
@pytest.mark.parametrize("said", ["2 1/2", "5/2", r"2\frac{1}{2}", "2.5"])
def test_a_whole_number_before_a_fraction_is_added_to_it(answer, said):
    """`2 1/2` was 3/2."""
    for sign in ("", "-"):
        columns = {"answer": sign + answer}
        assert math_verify(prompt="?", completion=rf"\boxed{{{sign}{said}}}", columns=columns) == 1.0
        assert math_verify(prompt="?", completion=r"\boxed{3/2}", columns=columns) == 0.0


@pytest.mark.parametrize(
    ("answer", "said", "reward"),
    [
        (r"1.6 \times 10^{-19}", r"6.6 \times 10^{-34}", 0.0),
        (r"1.6 \times 10^{-19}", r"-1.6 \times 10^{-19}", 0.0),
        (r"1.6 \times 10^{-19}", r"1.601 \times 10^{-19}", 0.0),
        (r"1.6 \times 10^{-19}", r"16 \times 10^{-20}", 1.0),
        (r"1.6 \times 10^{-19}", "0.00000000000000000016", 1.0),
        ("0.0000003", "0.0000001", 0.0),
        ("0.0000003", "0.0", 0.0),
        ("0.0000003", r"\frac{3}{10000000}", 1.0),
        ("0.0000003", "x = 0.0000001", 0.0),
        ("0.0000003", "x = 0.0000003", 1.0),
        ("x = 0.0000003", "0.0000001", 0.0),
        (3e-07, "0.0000001", 0.0),
        (3e-07, "0.0", 0.0),
        (3e-07, r"3 \times 10^{-7}", 1.0),
        ("2^{-60}", "2^{-70}", 0.0),
        ("2^{-60}", r"\frac{1}{2^{60}}", 1.0),
        (r"0.00003\%", "0.0000001", 0.0),
        (r"0.00003\%", "0.0000003", 1.0),
        ("0.000004", "0.0000044", 0.0),
        (r"\frac{1}{3000}", "0.000333", 1.0),
    ],
)
def test_small_numbers_are_compared_by_their_own_size(answer, said, reward):
    """Six decimals of numbers below 0.0000005 are 0, and a difference below 1e-15 was none."""
    assert math_verify(prompt="?", completion=rf"\boxed{{{said}}}", columns={"answer": answer}) == reward


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (r"\frac{1}{3}", "0.333333"),
        (r"\frac{1}{300}", "0.003333"),
        (r"\frac{1}{7}", "0.142857"),
        (r"\pi", "3.141593"),
        ("1234567.1234567", "1234567.123457"),
        (r"9\%", "9"),
        (r"9\%", "0.09"),
        (r"33.333333\%", "1/3"),
        ("0", "0.0"),
        ("0", r"\sqrt{6} - \sqrt{2} \sqrt{3}"),
        (r"\{0.333333, 2\}", r"\{2, \frac{1}{3}\}"),
        ("(0, 0.333333)", r"(0, \frac{1}{3})"),
        (r"\begin{pmatrix} 0.333333 \\ 2 \end{pmatrix}", r"\begin{pmatrix} \frac{1}{3} \\ 2 \end{pmatrix}"),
    ],
)
def test_other_numbers_are_compared_at_six_decimals(answer, said):
    assert math_verify(prompt="?", completion=rf"\boxed{{{said}}}", columns={"answer": answer}) == 1.0


@pytest.mark.parametrize(
    ("answer", "said", "reward"),
    [
        (r"3 \text{ hours } 20 \text{ minutes}", r"3 \text{ hours } 45 \text{ minutes}", 0.0),
        (r"3 \text{ hours } 20 \text{ minutes}", "3", 0.0),
        (r"3 \text{ hours } 20 \text{ minutes}", r"3 \mathrm{~h} \ 20.0 \mathrm{~min}", 1.0),
        (r"3 \text{ hours } 20 \text{ minutes}", r"3 \text{ hours and 20 minutes}", 1.0),
        (r"3 \text{ hours } 20 \text{ minutes}", r"3 \text{ hours } 20 \text{ minutes} = 200 \text{ minutes}", 1.0),
        (r"3 \text{ hours } 20 \text{ minutes}", r"3 \text{ hours } 20 \text{ seconds}", 0.0),
        (r"3 \text{ hours 20 minutes}", r"3 \text{ hours 45 minutes}", 0.0),
        (r"3 \mbox{ ft } \frac{1}{2} \mbox{ in}", r"3 \mbox{ ft } 1/2 \mbox{ in}", 1.0),
        (r"3 \mbox{ ft } \frac{1}{2} \mbox{ in}", r"3 \mbox{ ft } 1/3 \mbox{ in}", 0.0),
        ("5", r"5 \text{ km } 3 \text{ m}", 0.0),
        (r"2 \text{ of the 12 balls}", "2", 1.0),
        (r"2 \text{ (mod 7)}", "2", 1.0),
        (r"\sqrt{3} \text{ cm}", r"\sqrt{3} \text{ cm} \approx 1.73 \text{ cm}", 1.0),
        (r"17_{\text{base } 8}", r"17_{\text{base } 7}", 0.0),
        (
            r"\begin{cases} x & \text{if } x > 0 \\ 2x & \text{if } x < 0 \end{cases}",
            r"\begin{cases} x & \text{if } x > 0 \\ 3x & \text{if } x < 0 \end{cases}",
            0.0,
        ),
        (
            r"\begin{cases} x & \text{if } x > 0 \\ 2x & \text{if } x < 0 \end{cases}",
            r"\begin{cases} x & \text{for } x>0 \\ 2x & \text{for } x<0 \end{cases}",
            1.0,
        ),
    ],
)
def test_a_number_after_the_first_unit_is_part_of_the_answer(answer, said, reward):
    r"""The package cuts off all from the first \text on."""
    assert math_verify(prompt="?", completion=rf"\boxed{{{said}}}", columns={"answer": answer}) == reward
    assert math_verify(prompt="?", completion=f"It is ${said}$.", columns={"answer": answer}) == reward


@pytest.mark.parametrize(
    ("answer", "said", "reward"),
    [
        (r"5 \text{ km}", r"5 \text{ m}", 0.0),
        (r"5 \text{ km}", "5", 1.0),
        ("5", r"5 \text{ km}", 1.0),
        ("5 km", r"5 \text{ m}", 0.0),
        ("5 km", r"5 \text{ kilometers}", 1.0),
        (r"5 \text{ minutes}", r"5 \text{ m}", 1.0),
        (r"5 \text{ cm}^2", r"5 \text{ cm}^3", 0.0),
        (r"5 \text{ cm}^2", r"5 \text{ square centimeters}", 1.0),
        (r"5 \text{ cm}^2", r"5\mathrm{cm^{2}}", 1.0),
        (r"5 \text{ cm}^3", r"5 \text{ mL}", 1.0),
        (r"5 \text{ km/h}", r"5 \text{ m/s}", 1.0),  # not known
        (r"5 \text{ feet tall}", r"5 \text{ inches}", 1.0),
        (r"2.5 \text{ million}", r"2.5 \text{ billion}", 0.0),
    ],
)
def test_another_known_unit_is_wrong_and_a_missing_one_is_not(answer, said, reward):
    assert math_verify(prompt="?", completion=rf"\boxed{{{said}}}", columns={"answer": answer}) == reward


@pytest.mark.parametrize(
    "written", [r"12\,000", r"12\ 000", "12~000", "12 000", "12\u00a0000", "12,000", r"\$12\,000.0"]
)
def test_groups_of_three_digits_are_one_number(written):
    r"""`12\,000` was 12 times 0."""
    for answer, said in ((written, "12000"), ("12000", written)):
        assert math_verify(prompt="?", completion=rf"\boxed{{{said}}}", columns={"answer": answer}) == 1.0
    assert math_verify(prompt="?", completion=r"\boxed{0}", columns={"answer": written}) == 0.0
    assert math_verify(prompt="?", completion=r"It is $-1\,234\,567$.", columns={"answer": "-1234567"}) == 1.0


@pytest.mark.parametrize(
    ("answer", "said", "reward"),
    [
        (r"(12\,000, 3)", "(12000, 3)", 1.0),
        (r"12\,000\text{ km}", r"12000\text{ m}", 0.0),
        (r"2\,\frac{1}{2}", "2.5", 1.0),
        (r"x^2\,100", "100x^2", 1.0),
        (r"2\,100x", "2100x", 1.0),
        ("1000", r"\frac{1}{2}\,500", 0.0),
        ("600", "2 300 x", 0.0),
        ("0", r"1\,0000", 1.0),
        ("512", r"999\,999!", 0.0),
    ],
)
def test_other_spaces_between_numbers_mean_what_they_did(answer, said, reward):
    assert math_verify(prompt="?", completion=rf"\boxed{{{said}}}", columns={"answer": answer}) == reward


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("5", "5."),
        ("5", r"\frac{10}{2}."),
        ("0.5", "0.5."),
        (r"\frac{1}{2}", r"\left(\frac{1}{2}\right)."),
        ("90", "90°"),
        ("90°", r"90^\circ"),
        ("90°", "90"),
        ("18", "€18"),
        ("18", "£ 18.00"),
        ("€18", "18 €"),
        (r"\$18", "18"),
        ("12", "12 km/h"),
        ("12 km/h", "12"),
        ("12 km/h", r"12 \text{ km/h}"),
        ("2.5 g/cm^3", "2.5"),
        ("12 m/s", r"\frac{12m}{s}"),
        ("12", r"12\ \mathrm{m/s}"),
    ],
)
def test_a_full_stop_a_degree_sign_money_and_a_unit_by_another_one_are_no_other_answer(answer, said):
    assert math_verify(prompt="?", completion=rf"\boxed{{{said}}}", columns={"answer": answer}) == 1.0
    assert math_verify(prompt="?", completion=rf"\boxed{{1 + {said}}}", columns={"answer": answer}) == 0.0


def test_letters_that_are_no_units_are_variables():
    assert math_verify(prompt="?", completion=r"\boxed{12 a/b}", columns={"answer": "12"}) == 0.0
    assert math_verify(prompt="?", completion=r"\boxed{12 b/a}", columns={"answer": "12 a/b"}) == 0.0


@pytest.mark.parametrize(
    ("answer", "said", "reward"),
    [
        ("ABCD", "ABCD", 1.0),
        ("ABCD", r"\text{ABCD}", 1.0),
        ("ABCD", "ABDC", 0.0),
        ("ABCD", r"\text{ABDC}", 0.0),
        ("AB", "BA", 1.0),
        ("abc", "cba", 1.0),
        ("ABC", r"C \cdot B \cdot A", 1.0),
        ("25_7", "25_8", 0.0),
        ("25_7", "25_{7}", 1.0),
        ("25_7", "25", 1.0),
    ],
)
def test_a_word_of_capitals_is_no_product_and_a_base_is_part_of_a_number(answer, said, reward):
    assert math_verify(prompt="?", completion=rf"\boxed{{{said}}}", columns={"answer": answer}) == reward


@pytest.mark.parametrize(
    ("answer", "said", "reward"),
    [
        ("18", "18 eggs", 1.0),
        ("18 dollars", "18", 1.0),
        ("18 dollars", r"\$18", 1.0),
        ("5 people", r"5 \text{ people}", 1.0),
        ("5 years", "5", 1.0),
        ("1,200 people", "1200", 1.0),
        (r"\frac{1}{2}", r"\frac{1}{2} cups", 1.0),
        ("2.5", "2 1/2 cups", 1.0),
        ("18 eggs", "17 eggs", 0.0),
        ("5 meters", "5 kilometers", 0.0),
        ("25 percent", r"25\%", 1.0),
        ("5", "5 alpha", 0.0),
        ("18", "18 eggs and 3", 0.0),
        ("18", r"18 eggs}, \boxed{3 cats", 0.0),
    ],
)
def test_plain_words_after_a_number_are_no_product_of_letters(answer, said, reward):
    """`18 eggs` was 18 e g g s. Words that the package knows, such as apples, were units."""
    assert math_verify(prompt="?", completion=rf"\boxed{{{said}}}", columns={"answer": answer}) == reward


def test_words_after_the_column_s_number_do_not_fail_an_answer_without_a_box():
    assert math_verify(prompt="?", completion="There are 5 people.", columns={"answer": "5 people"}) == 1.0
    assert math_verify(prompt="?", completion="There are 6 people.", columns={"answer": "5 people"}) == 0.0


@pytest.mark.parametrize(
    ("answer", "said", "reward"),
    [
        ("1.6e-19", r"1.6 \times 10^{-19}", 1.0),
        ("1.6e-19", r"1.7 \times 10^{-19}", 0.0),
        (r"1.6 \times 10^{-19}", "1.6e-19", 1.0),
        ("6.02E23", r"6.02 \times 10^{23}", 1.0),
        (6.02e23, "602000000000000000000000", 1.0),
        ("1.5e3", "1,500", 1.0),
        ("$2e3$", "2000", 1.0),
        (1e-05, "0.00001", 1.0),
        ("2e-1", "2e - 1", 1.0),
    ],
)
def test_scientific_notation_is_a_number(answer, said, reward):
    """A text `1.6e-19`, in the column or in the answer, was 1.6 e - 19. `2e-1` may be either."""
    assert math_verify(prompt="?", completion=rf"\boxed{{{said}}}", columns={"answer": answer}) == reward


@pytest.mark.parametrize(
    ("said", "answer", "reward"),
    [
        ("<answer>42</answer>", "42", 1.0),
        ("<answer>\n-5\n</answer>", "-5", 1.0),
        ("<answer>42", "42", 1.0),
        ("<answer>42 times</answer>", "42", 1.0),
        ("<answer>(B) 42</answer>", "42", 1.0),
        ("<answer>(B) 43</answer>", "42", 0.0),
        ("<answer>42} garbage {5</answer>", "42", 0.0),
        ("The answer is 42 (in the <answer>...</answer> format).", "42", 1.0),
        ("<answer>42.</answer>", "42", 1.0),
        ("<answer>**42**</answer>", "42", 1.0),
        (r"<answer>\frac{1}{2}</answer>", "0.5", 1.0),
        ("<answer>(1, 2)</answer>", "(1,2)", 1.0),
        ("<answer>18 eggs</answer>", "18", 1.0),
        ("<answer>The answer is $42$.</answer>", "42", 1.0),
        ("<answer>The answer is 42</answer>", "42", 1.0),
        (r"It is \boxed{42}. <answer>42</answer>", "42", 1.0),
        ("It is 42.\n<answer></answer>", "42", 1.0),
        ("42 <answer>43</answer>", "42", 0.0),
        ("<answer>42</answer> or <answer>43</answer>", "42", 0.0),
        (r"<answer>5\pi</answer>", "5", 0.0),
        ("<answer>" * 20_000 + "42", "42", 1.0),
    ],
)
def test_without_a_box_the_answer_is_between_the_tags(said, answer, reward):
    """`<answer>42</answer>`, which the reward `format` asks for, earned 0, and a number before it counted."""
    completion = f"<think>6 times 7</think>{said}"
    assert math_verify(prompt="?", completion=completion, columns={"answer": answer}) == reward


@pytest.mark.parametrize("tail", ["fifths", "twentieths", "gross", "hundred", "dozen", "millions", "squared", "factorial", "divided by two",
                                  "modulo n", "sinh x", "sinx", "root x", "epsilon", "N", "or more", "below zero", "twenty"])  # fmt: skip
@pytest.mark.parametrize("form", [r"\boxed{%s}", "<answer>%s</answer>"])
def test_words_that_make_another_number_are_no_unit(tail, form):
    assert math_verify(prompt="?", completion=form % f"3 {tail}", columns={"answer": "3"}) == 0.0


@pytest.mark.parametrize(
    ("answer", "said", "reward"),
    [
        ("25 degrees", r"25^\circ\text{C}", 1.0),
        (r"5\text{ thousand}", r"5\text{ K}", 1.0),
        ("12 V", "12 kV", 0.0),
        ("12 volts", "12 kilovolts", 0.0),
        (r"90^\circ", "90 radians", 0.0),
        ("12 volts", r"12\text{ V}", 1.0),
        (r"5\text{ milliseconds}", "5 seconds", 0.0),
        ("30 miles per hour", "30 kilometers per hour", 0.0),
        ("2 N", "2", 0.0),
        ("1.6e-19 coulombs", r"1.6 \times 10^{-19}", 1.0),
        (r"2 \times 10^5 pascals", "200000", 1.0),
    ],
)
def test_a_single_letter_is_a_variable_and_an_unknown_unit_any(answer, said, reward):
    assert math_verify(prompt="?", completion=rf"\boxed{{{said}}}", columns={"answer": answer}) == reward


@pytest.mark.parametrize(
    ("answer", "said"), [("5 meters", "5 kilometers"), ("5", "5 sqrt(3)"), ("2", r"2 \sqrt{3} miles"), ("5", "5 alpha")]
)
@pytest.mark.parametrize("form", [r"\boxed{%s}", "<answer>%s</answer>", "<answer> %s </answer>"])
def test_an_answer_in_tags_is_refused_as_one_in_a_box(answer, said, form):
    """Between tags it was read again as a sentence, from which the first number counts."""
    assert math_verify(prompt="?", completion=form % said, columns={"answer": answer}) == 0.0


def test_a_long_solution_between_the_tags_is_no_formula():
    began = time.process_time()
    said = f"<answer>{'word ' * 6_000}</answer>"
    assert math_verify(prompt="?", completion=said, columns={"answer": "42"}) == 0.0
    assert time.process_time() - began < 4.0


@pytest.mark.parametrize("part", [" ", "}", ",", "1", "1,", "a", "1a", "^", r"\text{", r"\frac 1 ", "1/", "{"])
def test_long_text_after_a_unit_is_read_in_time(part):
    began = time.process_time()
    tail = rf"\text{{ km {part * 20_000}}}"
    assert same_tail(f"5 {tail}", f"5 {tail}") and same_tail(rf"{{ {tail}", rf"{{ {tail}")
    assert time.process_time() - began < 4.0


@pytest.mark.parametrize(
    "said",
    [
        '```python\nx = 1\n```\nSo:\n```json\n{"x": 1}\n```',
        '<think>Not this:\n```json\n[]\n```\n</think>{"x": 1}',
        "```JSON\n{}\n```",
        "```json\r\n{}```",
    ],
)
def test_a_block_of_another_language_or_of_the_reasoning_is_not_the_json(said):
    assert json_schema(completion=said, columns={}, schema={"type": "object"}) == 1.0


def test_json_is_checked_against_the_prompts_own_schema():
    columns = {"wanted": {"type": "object", "required": ["x"]}}
    judged = [json_schema(completion=said, columns=columns, column="wanted") for said in ('{"x": 1}', '{"y": 1}', "x")]
    assert judged == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400"])
def test_what_is_no_number_of_json_earns_nothing_and_is_no_failure(number):
    schema = {"type": "object", "properties": {"x": {"multipleOf": 0.01}}}
    assert json_schema(completion=f'{{"x": {number}}}', columns={}, schema=schema) == 0.0
    assert json_schema(completion=number, columns={}, schema={"type": "number"}) == 0.0


def test_a_fence_and_many_empty_lines_are_read_once():
    """Each empty line began the search for the end anew: 100,000 took minutes."""
    began = time.process_time()
    assert json_schema(completion="```" + "\n" * 100_000, columns={}, schema={}) == 0.0
    assert time.process_time() - began < 5.0


def test_a_compute_score_that_names_a_number_reward_is_scored_by_its_score():
    judge = VerlReward(function=lambda **_: {"score": 1.0, "reward": 0.0, "acc": 1.0}, ground_truth="a")
    assert judge(completion="", columns={"a": 1}) == {"reward": 1.0, "acc": 1.0}


def test_numbers_of_numpy_and_torch_are_components_of_a_compute_score():
    """`np.mean` of float32, `np.sum`, a comparison of arrays; neither text nor arrays are numbers."""
    numbers = {"share": np.float32(0.5), "hits": np.int64(2), "acc": np.bool_(True), "length": torch.tensor(3.0)}
    score = {"score": np.float32(1.0), **numbers, "pred": np.str_("7"), "each": np.ones(1), "none": None}
    judge = VerlReward(function=lambda **_: score, ground_truth="a")
    judged = to_reward(judge(completion="", columns={"a": 1}))
    assert judged.value == 1.0 and judged.components == {"share": 0.5, "hits": 2.0, "acc": 1.0, "length": 3.0}


def test_what_is_no_number_for_a_reward_is_left_out_of_a_compute_score_or_said():
    judge = VerlReward(function=lambda **_: {"score": 1.0, "odd": torch.tensor(1j), "many": 10**400}, ground_truth="a")
    judged = judge(completion="", columns={"a": 1})
    assert judged == {"reward": 1.0, "many": 10**400}
    with pytest.raises(DataError, match="many"):
        to_reward(judged)


def test_a_compute_score_may_be_asynchronous_and_finds_extra_info_to_be_a_dict():
    async def compute_score(*, extra_info, **_):
        return {"score": 1.0, "acc": float(extra_info.get("hint", 0))}

    judge = VerlReward(function=compute_score, ground_truth="a")
    assert asyncio.run(judge(completion="", columns={"a": 1})) == {"reward": 1.0, "acc": 0.0}


def test_a_compute_score_gets_verls_reward_kwargs_which_replace_its_arguments():
    given = {}
    judge = VerlReward(
        function=lambda **all: given.update(all) or 1.0, ground_truth="a", kwargs={"w": 0.5, "data_source": "b"}
    )
    judge(completion="", columns={"a": 1, "data_source": "c"})
    assert (given["w"], given["data_source"], given["ground_truth"]) == (0.5, "b", 1)


OF_ONE = {"prompt": "2+2?", "completion": "4", "token_ids": [], "columns": {"label": "4"}}


@pytest.mark.parametrize("rewards", [torch.tensor(1.0), torch.tensor([1.0]), [1.0], 1.0])
def test_a_reward_func_of_openrlhf_gets_lists_of_one_and_may_return_a_number(rewards):
    def reward_func(queries, prompts, labels):
        assert (queries, prompts, labels) == (["2+2?4"], ["2+2?"], ["4"])
        return {"rewards": rewards, "scores": [0.5]}

    judged = to_reward(OpenRlhfReward(function=reward_func)(**OF_ONE))
    assert (judged.value, judged.components) == (1.0, {"score": 0.5})


def test_a_reward_func_of_openrlhf_without_label_key_gets_an_empty_label():
    judge = OpenRlhfReward(function=lambda _queries, _prompts, labels: float(labels == [""]), label_column=None)
    assert judge(**OF_ONE) == 1.0
    with pytest.raises(DataError, match="label_column: null"):
        OpenRlhfReward(function=print)(**OF_ONE | {"columns": {}})


def test_queries_of_openrlhf_have_the_special_tokens_of_the_completion_with_a_tokenizer(tmp_path):
    tokenizer = make_tokenizer(adds_bos=True)
    tokenizer.save_pretrained(tmp_path)
    queries = []
    judge = OpenRlhfReward(function=lambda given, *_: queries.extend(given) or 0.0, tokenizer=str(tmp_path))
    judge(**OF_ONE | {"token_ids": tokenizer("4<eos>", add_special_tokens=False).input_ids})
    assert queries == ["2+2?4<eos>"]


def test_what_is_no_schema_is_an_error_of_the_prompt():
    for wanted in ({"type": "thing"}, {"$ref": "http://elsewhere.example/schema"}, "no schema"):
        with pytest.raises(DataError, match="must be a JSON schema"):
            json_schema(completion="{}", columns={"wanted": wanted}, column="wanted")
    with pytest.raises(ConfigError, match="takes one of schema and column"):
        json_schema(completion="{}", columns={})


def test_length_fades_beyond_its_limit():
    """4 is the limit, and 4 more tokens fade: 6 tokens are half-way."""
    judged = [length(token_ids=[1] * number, at_most=4, at_least=2, fade=4) for number in (1, 2, 4, 6, 8, 9)]
    assert judged == [0.0, 1.0, 1.0, 0.5, 0.0, 0.0]


def test_lengths_that_no_completion_has_are_a_mistake_and_not_a_reward_of_0():
    with pytest.raises(ConfigError, match="at_least=5 is more than at_most=4"):
        length(token_ids=[1], at_most=4, at_least=5)


@pytest.mark.parametrize(
    "said", ["<think></think><answer>1</answer>", "so <think>a</think><answer>1</answer>",
     "<think>a</think><answer>b</think></answer>", "<think>a</answer></think><answer>b</answer>", "<answer>1</answer><think>a</think>",
             "<think>a</think><think>b</think><answer>1</answer>", "<think>a</think><answer>1</answer> done"],
)  # fmt: skip
def test_a_format_that_is_not_met_to_the_letter_earns_nothing(said):
    assert format(completion=said) == 0.0


@pytest.mark.parametrize(
    ("prompt", "said", "earned"),
    [
        ("Q<|assistant|><think>\n", "a</think><answer>1</answer>", 1.0),
        ("Q<|assistant|><think>\n", "<think>a</think><answer>1</answer>", 0.0),
        ("Q<|assistant|>", "a</think><answer>1</answer>", 0.0),
    ],
)
def test_a_first_block_that_the_prompt_begins_is_of_the_format(prompt, said, earned):
    assert format(prompt=prompt, completion=said) == earned


def test_repeated_ngrams_cost_their_share():
    """Pairs of "a b a b": ab, ba, ab. One of three was there before."""
    assert ngram_repetition(completion="a b a B", n=2) == pytest.approx(-1 / 3)
    assert ngram_repetition(completion="a b c d", n=2) == 0.0
    assert ngram_repetition(completion="a", n=2) == 0.0


def test_letters_of_another_script_count_against_the_language():
    """Six Latin letters and two Chinese ones; digits are of no language."""
    assert language_consistency(completion="answer 42 答案") == 0.75
    assert language_consistency(completion="答案 42", script="han") == 1.0
    assert language_consistency(completion="人々", script="japanese") == 1.0, "the mark that repeats a letter"
