"""Values of the journal: submissions, their requests, outcomes and output commits. Frozen; torch-free, ray-free."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from modelpool.actors.outputs.layout import OutputLayout
from modelpool.actors.request.labels import LABEL_FIELDS, NO_LABELS, Labels, labels_from_json
from modelpool.actors.request.qos import QOS_FIELDS
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import unusable_field
from modelpool.scheduler.model.messages import Outcome

#: longest id that a driver may choose
MAX_ID_LENGTH = 100
#: fields of a request, and of its parts, that name files
FILE_FIELDS = (
    *("image", "mask", "last_image", "reference", "video", "video_mask", "face_video"),
    *("controls", "image_prompts", "regions"),
)
#: a deadline that has passed: as urgent as possible
LEAST_DEADLINE_SECONDS = 1.0


class SubmissionState(StrEnum):
    """States of a submission."""

    RECEIVING = "receiving"  #: some of its requests are journaled; not acknowledged, does not run
    ACTIVE = "active"  #: acknowledged: its requests run, or wait
    ENDED = "ended"  #: every request has an outcome


@dataclass(frozen=True, slots=True)
class NewSubmission:
    """A submission to acknowledge.

    submission_id  chosen by the driver: submitting again under the same id has no effect
    output         folder or URL of the outputs, as the service's node sees it
    user           for requests that set none
    request_count  requests that will be appended before it is sealed; 0 if that is not known before
    file_name      template of the names of its outputs; "" for the usual names
    layout         that the place of its outputs must have; None for the one that it has
    """

    submission_id: str
    output: str
    user: str
    request_count: int
    file_name: str = ""
    layout: OutputLayout | None = None

    def __post_init__(self) -> None:
        if not 0 < len(self.submission_id) <= MAX_ID_LENGTH or not self.submission_id.isprintable():
            raise unusable_field("id", self.submission_id, f"1 to {MAX_ID_LENGTH} printable characters")
        if self.request_count < 0:
            raise unusable_field("requests", self.request_count, "a number of requests, or 0")


@dataclass(frozen=True, slots=True)
class SubmissionRecord:
    """A submission in the journal.

    created_at  wall-clock time of its acknowledgement, in Unix seconds
    counts      number of requests by outcome; the others are pending
    trouble     why none of its requests start; "" if they do
    file_name   template of the names of its outputs; "" for the usual names
    """

    submission_id: str
    state: SubmissionState
    output: str
    user: str
    request_count: int
    created_at: float
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    trouble: str = ""
    file_name: str = ""

    @property
    def pending(self) -> int:
        """Requests without an outcome."""
        return self.request_count - self.succeeded - self.failed - self.cancelled


def name_of(submission_id: str) -> str:
    """Return the name of a submission from an id of `job_service.new_id`."""
    return submission_id.rsplit(".", 2)[0]


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request without an outcome. `place` is its number in the submission, from 0."""

    place: int
    text: str


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """The outcome of a request.

    file            name in the output folder, if it succeeded
    pixels_sha256   of the output, as in the manifest
    error_kind, message  if it failed
    labels          of the request, where outcomes are read
    """

    submission_id: str
    place: int
    outcome: Outcome
    file: str = ""
    file_bytes: int = 0
    pixels_sha256: str = ""
    error_kind: str = ""
    message: str = ""
    labels: Labels = NO_LABELS


def request_text(request: GenerateRequest, folder: Path) -> str:
    """Return a request as JSON that another process can run: relative paths of files become paths below `folder`.

    Raises UnusableField for a request without a seed, and for images in memory, which no file on disk can restore.
    """
    if request.seed is None:
        raise unusable_field("seed", None, "a seed: the same request must give the same image after a restart")
    fields = [name for name in FILE_FIELDS if getattr(request, name, None) is not None]
    try:
        values = request.model_dump(mode="json", exclude_unset=True)
        text = json.dumps(_with_absolute_paths(values, folder))
        GenerateRequest.model_validate_json(text)
    except ValueError as error:
        found = ", ".join(fields) or "request"
        raise unusable_field(
            found, "an image in memory", f"the path of a file, which lasts until the job runs ({error})"
        ) from error
    return text


def restored_request(text: str) -> GenerateRequest:
    """Return the request that `request_text` wrote. Raises ValueError if this version of modelpool refuses it."""
    return GenerateRequest.model_validate_json(text)


def labels_in_text(text: str) -> Labels:
    """Return the labels of a request that `request_text` wrote."""
    return labels_from_json(json.loads(text))


def with_deadline(request: GenerateRequest, passed_seconds: float) -> GenerateRequest:
    """Return `request` with its deadline as it is `passed_seconds` after its submission."""
    if request.deadline is None:
        return request
    return request.model_copy(update={"deadline": max(request.deadline - passed_seconds, LEAST_DEADLINE_SECONDS)})


def kind_of(request: GenerateRequest) -> str:
    """Return the fields other than texts, seed, labels and quality of service. If a pool can run one request of a kind,
    it can run them all: a batch has few kinds, however long it is.
    """
    return request.model_dump_json(exclude={"prompt", "negative", "seed", *QOS_FIELDS, *LABEL_FIELDS})


def _with_absolute_paths(value: Any, folder: Path, is_file: bool = False) -> Any:
    match value:
        case dict():
            return {
                # the inputs of a node of a workflow are other nodes
                name: item if name == "inputs" else _with_absolute_paths(item, folder, name in FILE_FIELDS)
                for name, item in value.items()
            }
        case list():
            return [_with_absolute_paths(item, folder, is_file) for item in value]
        case str() if is_file:
            return str(folder / Path(value).expanduser())
    return value
