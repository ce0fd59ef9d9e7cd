"""Texts that every file can store."""


def writable(text: str) -> str:
    """`text` with a question mark for each lone surrogate, which JSON can hold but UTF-8 cannot."""
    return text.encode(errors="replace").decode()
