"""Refusals of requests. Each dialect gives them the form that its clients turn into exceptions."""

from __future__ import annotations


class ApiError(Exception):
    """A request that is refused: `param` is the field at fault, `code` a word for programs.

    `status` is HTTP's. Clients repeat a request by themselves after 429 and from 500 on.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
