import pytest

from actors.too_large import is_too_large


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9**9",
        "2**100001",
        "2**-100001",
        ".5**10**6",
        "9**1_000_000",
        "9**1e6",
        "(2)**(10**6)",
        "(9**9)**(9**9)",
        "x + 9**9**9 * y",
        "9**(1 + 9**9)",
        "9**(9*9*9*9*9*9)",
        "(1/3)**10**6",
        "(10**100000)**11",
        "sqrt(9)**10**6",
        "pow(9 - 1, 1 + 10**6)",
        "root(9, 1/10**6)",
        "factorial(100001)",
        "factorial(9)**99999 * factorial(9 + 99999)",
        "(9!)!",
        "(10**6)!",
        r"\left(9^9\right)^{9^9}",
        r"\frac{1}{3}^{1000000}",
        r"9^{\frac{9999999}{3}}",
        r"\Gamma(1000000)",
        "(2^{(10^6",
    ],
)
def test_a_formula_is_too_large(text):
    assert is_too_large(text)


@pytest.mark.parametrize(
    "text",
    [
        "2**100000",
        "10^{-100000}",
        "100000!",
        "(10**100000)**9",
        "(9 + 8)**2 * factorial(5)",
        "2^{10} 3^{10}",
        "2^n 10^6",
        "x^{1000000} e^{1000000}",
        "(-1)^{1000001}",
        "(3!)!",
        "7!!",
        "x_{2}^{1000000}",
        r"\sum_{k=2}^{1000000} k",
        r"[0, 10^5)",
        "9" * 5000,
        "2^{1000} + 2^{1000}",
    ],
)
def test_a_formula_is_computed(text):
    assert not is_too_large(text)
