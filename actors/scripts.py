"""Words in texts of any script."""

WORD = (
    r"[^\W\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u31ff\u3400-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff"
    r"\U00020000-\U0003ffff]"
)
"""A letter, digit or underscore. Chinese, Japanese, Korean and South-East Asian characters touch a word without being of it."""
