"""The routes of an answer taken apart from its other fields, before any JSON is read.

They are nearly all of a long answer, and one base64 string. A JSON reader looks at each of its characters, and takes as
long for that as base64 takes to decode them. The string's end alone is found four times as fast.
"""

from __future__ import annotations

import re

KEY = b'"routed_experts"'
EMPTY = b'""'
"""Stands in the other fields where the routes were."""
_VALUE = re.compile(rb'\s*:\s*(")')
_PART = 1 << 17
"""Bytes looked at together: they stay in the processor's cache."""
_LONGEST = 1 << 8
"""Bytes in which the key, its colon and the first quotation mark are found."""


def without_routes(body: bytes | memoryview) -> tuple[bytes, memoryview] | None:
    """The answer with an empty string for its routes, and the routes with their quotation marks, as they lie in `body`.

    None where it is not plain what the string is: its key is not there exactly once, or not followed by a string
    without a backslash before its end. A caller reads the whole answer then.

    In JSON a quotation mark inside a string has a backslash before it. So a `"` behind `,` or `{` begins or ends a
    string, and one before a name begins it: the key is a key.
    """
    view = memoryview(body)
    place = _find(view, KEY, 0)
    colon = _VALUE.match(bytes(view[place + len(KEY) : place + _LONGEST])) if place > 0 else None
    if colon is None or bytes(view[:place][-_LONGEST:]).rstrip()[-1:] not in (b",", b"{"):
        return None
    start = place + len(KEY) + colon.start(1)
    end = _find(view, b'"', start + 1) + 1
    if not end or view[end - 2] == ord("\\") or _find(view, KEY, end) >= 0:
        return None
    return b"".join((view[:start], EMPTY, view[end:])), view[start:end]


def _find(view: memoryview, what: bytes, start: int) -> int:
    """First place of `what` from `start` on, or -1."""
    for first in range(start, len(view), _PART):
        place = bytes(view[first : first + _PART + len(what) - 1]).find(what)
        if place >= 0:
            return first + place
    return -1
