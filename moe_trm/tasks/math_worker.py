"""The process in which math-verify runs: one JSON object a line in, one out.

math-verify bounds its own running time with `signal.alarm`, which works on the main thread only and would disturb a server's own
signals. Here it has a main thread of its own, and whoever asks can end the process when even that bound does not hold.
"""

from __future__ import annotations

import json
import logging
import re
import sys

from math_verify import parse, verify

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def equal(answer: str, text: str, timeout_s: int) -> bool | None:
    """Whether `text` means the same as `answer` mathematically; None when the expected answer itself says nothing mathematical."""
    gold = parse(_plain(answer, anchored=True), parsing_timeout=timeout_s)
    if not gold:
        return None
    return bool(verify(gold, parse(_plain(text, anchored=False), parsing_timeout=timeout_s), timeout_seconds=timeout_s))


def _plain(text: str, *, anchored: bool) -> str:
    """Without the commas of thousands; a LaTeX answer between dollar signs, where math-verify looks for LaTeX."""
    text = _THOUSANDS.sub("", text.strip())
    return f"${text}$" if anchored and "\\" in text and "$" not in text else text


def main() -> None:
    """Serve until standard input ends."""
    logging.disable(logging.WARNING)
    for line in sys.stdin:
        request = json.loads(line)
        reply = equal(request["answer"], request["text"], request["timeout_s"])
        print(json.dumps({"equal": reply}), flush=True)


if __name__ == "__main__":
    main()
