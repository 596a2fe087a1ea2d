"""uv looks for wheels where pip is told to look."""

from __future__ import annotations

import runpy
from pathlib import Path

INSTALL = runpy.run_path(str(Path(__file__).parents[3] / "requirements" / "install.py"))


def test_uv_gets_pips_indexes_and_the_environment_wins_over_the_file() -> None:
    listed = (
        "global.extra-index-url='https://a.example/simple https://b.example/simple'\n"
        "global.find-links='/wheels'\n"
        "global.timeout='60'\n"
        ":env:.find-links='/other /more'\n"
    )
    assert INSTALL["uv_settings"](listed) == {
        "UV_INDEX": "https://a.example/simple https://b.example/simple",
        "UV_FIND_LINKS": "/other,/more",
    }
    first = ":env:.index-url='https://mine.example'\nglobal.index-url='https://theirs.example'\n"
    assert INSTALL["uv_settings"](first) == {"UV_DEFAULT_INDEX": "https://mine.example"}
