"""Texts that every file takes."""


def writable(text: str) -> str:
    """Without halves of characters, which JSON can hold and no file takes: a question mark stands for each."""
    return text.encode(errors="replace").decode()
