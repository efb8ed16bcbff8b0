"""`with_images_read`: reads the images and videos of a request before a pool starts, so that wrong files are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelpool.actors.request.requests import GenerateRequest


def with_images_read(request: GenerateRequest) -> GenerateRequest:
    """Return `request` with its images and videos read, as a pool gets them. Raises UserError for files that cannot be
    read."""
    from modelpool.actors.client.model_checks import has_unread_inputs

    if not has_unread_inputs(request):
        return request
    from modelpool.actors.control.inputs.input_images import InputImages

    return InputImages(lambda image: None).bring(request)[0]
