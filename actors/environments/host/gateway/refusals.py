"""Refusal of a request, in the format of OpenAI's API."""

from typing import Any


class RefusedError(Exception):
    """An HTTP status and an error object."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        """`code` is for programs. `param` names the refused field of the request."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
