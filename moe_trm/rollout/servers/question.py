"""One answer that is asked of a server, and the form of an engine's requests and answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.sampling_mask.violation import Violation
from moe_trm.types import SampledTurn, SamplingParams


@dataclass(frozen=True)
class RequestedFields:
    """Fields requested besides tokens and log-probs; a requested field that is missing rejects the record."""

    routes: bool
    mask: bool
    violation: Violation = "reject"
    """Treatment of a sampled token outside its own mask."""
    partial: bool = False
    """True when an answer aborted after its first token is a record too: the beginning of one, to be continued."""
    missing: Literal["reject", "native"] = "reject"
    """Treatment of a sample with recomputed routes (`SampledTurn.recomputed`): reject it, or leave them out."""
    run: str = ""
    """Name of the run in the labels of weights (`ownership.version_of`); empty before its first push."""


@dataclass(frozen=True)
class Question:
    """A question for one answer: the ids to continue, the sampling with the answer's most tokens, the fields of the
    record, and the first row of the routes to return; those before `start` are known.

    `request_id` begins the id of each request that is sent for it, where the engine's answers name theirs. `pictures`:
    of the runs of `image` tokens in `context`.
    """

    context: tuple[int, ...]
    params: SamplingParams
    requested: RequestedFields
    start: int = 0
    request_id: str = ""
    pictures: tuple[bytes, ...] = ()
    image: int | None = None


class AnswerFormat(ABC):
    """The form of one engine's requests and answers. Made without arguments.

    Attributes:
        generate_path: of a POST for one answer.
    """

    generate_path: ClassVar[str] = "/generate"

    @abstractmethod
    def request(self, question: Question) -> dict[str, object]:
        """The JSON body of the POST to `generate_path`."""

    @abstractmethod
    def parse(self, body: bytes | memoryview, question: Question, model: ServedModel) -> SampledTurn:
        """The checked answer. Pure. Raises `RecordRejected` for one that violates an invariant."""
