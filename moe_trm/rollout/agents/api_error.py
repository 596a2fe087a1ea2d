"""Refusals in the form of OpenAI's interface, which its clients turn into exceptions of their own."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request that is refused, in OpenAI's form: `param` is the field at fault, `code` a word for programs.

    `status` is HTTP's. Clients repeat a request by themselves after 429 and from 500 on.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""Types of errors by status, where they are not those of their hundred."""
