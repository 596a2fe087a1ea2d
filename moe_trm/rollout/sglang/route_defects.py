"""Settings and releases of SGLang with which its routes are not those of the forwards that sampled, and who says so.

A launch is checked by the options of its command line, a running server by its `/server_info`. Importing this module
imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class RouteDefect:
    """One such setting.

    Attributes:
        setting: its name in `/server_info`.
        harmless: values without the defect.
        options: of `sglang.launch_server`, which set it; empty where no option of ours can.
        what: what happens to the routes.
        source: where this is known from.
        fixed_in: the first release without it; None while there is none.
        device: the only device it happens on; None: any.
    """

    setting: str
    harmless: tuple[object, ...]
    options: tuple[str, ...]
    what: str
    source: str
    fixed_in: str | None = None
    device: str | None = None

    @property
    def fix(self) -> str:
        """Advice."""
        start = f"Start the server with {self.setting}={self.harmless[0]}"
        return f"{start}, or serve with SGLang {self.fixed_in} or newer." if self.fixed_in else f"{start}."

    def harms(self, value: object) -> bool:
        """True unless `value` of the setting is harmless; words of a command line count as what they say."""
        return str(value).lower() not in {str(harmless_value).lower() for harmless_value in self.harmless}


ROUTE_DEFECTS = (
    RouteDefect(
        setting="enable_hierarchical_cache",
        harmless=(False,),
        options=("--enable-hierarchical-cache", "--enable-hicache"),
        what="rows that come back from host memory have the routes of the tokens that used their places last",
        source="sglang#26975; its fix sglang#39027 is open",
    ),
    RouteDefect(
        setting="enable_lmcache",
        harmless=(False,),
        options=("--enable-lmcache",),
        what="rows that come back from LMCache have the routes of the tokens that used their places last",
        source="as for the hierarchical cache, sglang#26975: in SGLang 0.5.23 no cache stores routes",
    ),
    RouteDefect(
        setting="speculative_algorithm",
        harmless=(None,),
        options=("--speculative-algorithm",),
        what=(
            "drafted tokens are verified in one forward, whose routes the n-gram worker drops, and accepted tokens of "
            "a tree move in the cache without theirs; before 0.5.23 a draft model's routers write into the same rows"
        ),
        source="SGLang 0.5.23, speculative/ngram_worker.py and spec_utils.py; sglang#26980",
    ),
    RouteDefect(
        setting="disaggregation_mode",
        harmless=("null", None),
        options=("--disaggregation-mode",),
        what="a server that decodes never ran the prompt, and one that prefills never ran the answer",
        source="sglang#22916",
    ),
    RouteDefect(
        setting="pp_size",
        harmless=(1,),
        options=("--pp-size", "--pipeline-parallel-size"),
        what="a pipeline stage knows the routes of its own layers only",
        source="sglang#12162",
    ),
    RouteDefect(
        setting="disable_overlap_schedule",
        harmless=(True,),
        options=(),
        what="the next forward overwrites routes before they are copied to the host",
        source="sglang#34319",
        fixed_in="0.5.23",
        device="cuda",
    ),
)
"""All that are known. What a retraction does is told by each answer (`num_retractions`), and is no reason to refuse."""


def defects_of(server: Mapping[str, Any]) -> Iterator[tuple[RouteDefect, object]]:
    """The defects of a running server with this `/server_info`, and its settings that cause them.

    A setting that the server does not name counts as harmful.
    """
    version = _version(str(server.get("version")))
    for defect in ROUTE_DEFECTS:
        if defect.fixed_in is not None and version >= Version(defect.fixed_in):
            continue
        if defect.device not in (None, server.get("device", defect.device)):
            continue
        if defect.setting not in server:
            yield defect, "not said"
        elif defect.harms(server[defect.setting]):
            yield defect, server[defect.setting]


def defects_asked_for(arguments: Sequence[str]) -> Iterator[tuple[RouteDefect, str]]:
    """The defects that a command line of `sglang.launch_server` asks for, and the words that do."""
    for place, argument in enumerate(arguments):
        option, has_value, value = argument.partition("=")
        following = arguments[place + 1 : place + 2]
        words = [argument]
        if not has_value and following and not following[0].startswith("--"):
            value = following[0]
            words.append(value)
        for defect in ROUTE_DEFECTS:
            if option in defect.options and defect.harms(value or True):
                yield defect, " ".join(words)


def _version(text: str) -> Version:
    """A release, or the oldest there is where the server's is not known."""
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")
