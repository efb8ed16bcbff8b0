"""What can be asked of models whose result another model makes an image of (Stable Cascade's stage C), of those others
(stage B), and of all the rest; and the work of the second of the two.

Pure functions over values. Every complaint names a field of a request.
"""

from __future__ import annotations

from dataclasses import replace

from modelpool.actors.graph.orders import DecodeOrder, EncodeOrder, SampleOrder
from modelpool.actors.graph.output_shape import made_by
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.core.sampling_facts import SamplingFacts
from modelpool.pool.core.stage_params import ModelRef, SampleWork
from modelpool.pool.families.cascade_families import prior_cells

#: the largest seed. The second model draws by the complement of the request's, so that its noise is none of the first's
_LAST_SEED = 2**64 - 1


def check_decoder(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for what no model of `facts` can be asked for in an image that two models make."""
    if facts.reads_prior:
        expected = (
            "a model that reads a text: this one makes images of what such a model made. Name that one here, and "
            "this one in the field decoder"
        )
        raise unusable_field("model", request.model, expected)
    if not facts.hands_on:
        if request.decoder is not None:
            expected = f"none: model {request.model!r} makes {made_by(facts)} by itself"
            raise unusable_field("decoder", request.decoder.model or "one", expected)
        return
    asked = {"image": request.image, "mask": request.mask, "controls": request.controls or None}
    for name, value in asked.items():
        if value is not None:
            raise unusable_field(name, "one", f"none: model {request.model!r} makes images of texts alone")
    if request.hires is not None and request.hires.via == "picture":
        expected = f"'latent': model {request.model!r} reads no images"
        raise unusable_field("hires.via", "picture", expected)


def check_decodes(model: str, facts: SamplingFacts) -> None:
    """Raise UnusableField for a latent of a driver's own of a model whose latents another one makes images of: that
    reads the text too."""
    if facts.hands_on:
        expected = (
            f"a result of sample(): what {model!r} makes becomes an image by another model, which reads the text too"
        )
        raise unusable_field("latent", "numbers that the driver brings", expected)


def check_reads_images(model: str, facts: SamplingFacts) -> None:
    """Raise UnusableField for a model without the component that makes latents of images."""
    if facts.hands_on:
        raise unusable_field("model", model, "one that makes latents of images: this one makes images of texts alone")


def decoder_name(order: DecodeOrder) -> str:
    """The name of the second model, "" where `order` names none. Whoever asks for a stage alone may name it as the
    model that decodes."""
    assert isinstance(order.latent, SampleOrder), "a latent of a driver's own is of the model that decodes it"
    if order.decoder is not None and order.decoder.model:
        return order.decoder.model
    return "" if order.model == order.latent.model else order.model


def second_texts(order: DecodeOrder) -> tuple[EncodeOrder, ...]:
    """The texts that the second model reads, as the first model's text encoder reads them: the prompt, and where it is
    guided the negative prompt, of its own or the first model's, or else an empty one."""
    assert isinstance(order.latent, SampleOrder)
    positive, own = order.latent.positive, None if order.decoder is None else order.decoder.negative
    if _cfg(order) == 1:
        return (positive,)
    negative = own or order.latent.negative
    return (positive, negative or replace(positive, text="", is_negative=True))


def second_work(model: ModelRef, made: SampleWork, order: DecodeOrder, facts: SamplingFacts) -> SampleWork:
    """What the second model does, `model` of `facts`, with the result of the work `made`: its own usual run, but for
    what `order` says of it."""
    usual = facts.usual
    assert usual is not None, "a model that reads another's result has a usual run"
    said = None if order.decoder is None else order.decoder.steps
    return SampleWork(
        model=model,
        loras=(),
        width=made.width,
        height=made.height,
        steps=usual.steps if said is None else said,
        cfg=_cfg(order),
        sampler=usual.sampler,
        schedule=usual.schedule,
        seed=_LAST_SEED - made.seed,
        prior=prior_cells(made.width, made.height),
    )


def _cfg(order: DecodeOrder) -> float:
    said = None if order.decoder is None else order.decoder.cfg
    return 1.0 if said is None else said
