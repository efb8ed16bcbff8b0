"""`ImagePromptIndex`: finds image prompt adapters and vision encoders by name, and keeps adapters open."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

from modelpool.pool.catalog.fetch_sizes import with_fetch
from modelpool.pool.catalog.registry.file_purpose import VISION_ENCODERS
from modelpool.pool.catalog.registry.folder_scan import WeightsFile
from modelpool.pool.catalog.registry.hub_names import name_of_file
from modelpool.pool.catalog.registry.registry import Registry
from modelpool.pool.devices.capabilities import DeviceCapabilities
from modelpool.pool.families.detection.vision import states_widths
from modelpool.pool.inference.conditioning.micro_conditioning import pooled_width
from modelpool.pool.inference.image_prompts.open_adapter import OpenImagePrompt
from modelpool.pool.models.components.vision.preprocess import states_shape
from modelpool.pool.models.loading.open_model import OpenModel
from modelpool.pool.models.loading.weights_header import read_weights_header
from modelpool.pool.values.core.errors import UnusableField, UserError, unusable_field
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.core.remote_file import RemoteFile
from modelpool.pool.values.core.sampling_facts import SeenAs, VisionEncoderUse
from modelpool.pool.values.core.stage_params import FoundImagePrompt, ImagePromptRef, ModelRef
from modelpool.pool.values.specs.spec import ComponentSpec, ComponentUse, Role
from modelpool.pool.weights.quant.detect_layers import weight_shapes

#: adapters that stay mapped and built, without weights
ADAPTERS_KEPT = 32
#: remembered names, the first of each file
NAMES_REMEMBERED = 65_536
#: vision encoders that have their widths remembered
WIDTHS_REMEMBERED = 1024
#: name of FaceID Plus of version 2, which nothing in the file tells. Source: h94/IP-Adapter-FaceID
_VERSION_2 = "plusv2"
#: names of files in a folder of transformers, which say nothing without the folder's
_GENERIC = frozenset({"model", "pytorch_model"})


class ImagePromptIndex:
    """The image prompt adapters of one registry."""

    def __init__(
        self, registry: Registry, device: str | DeviceCapabilities, open_model: Callable[[ModelRef], OpenModel]
    ) -> None:
        """`device` is what they will run on, or the name of its kind."""
        self._registry, self._device, self._open_model = registry, device, open_model
        self._opened: LruCache[object, OpenImagePrompt] = LruCache(ADAPTERS_KEPT)
        self._names: LruCache[str, str] = LruCache(NAMES_REMEMBERED)
        #: widths of the outputs of vision encoders, by file; None for one that cannot be used
        self._widths: LruCache[Hashable, frozenset[int] | None] = LruCache(WIDTHS_REMEMBERED)

    def find(self, name: str, images: int, encoder: str = "") -> FoundImagePrompt:
        """Return the adapter named `name` for `images` images, with the vision encoder named `encoder`; without a name,
        the only registered one that fits. Raises UnknownName, AmbiguousName, CorruptFile, UnknownArchitecture, and
        UnusableField if the encoder does not fit, or none does, or several do."""
        file = self._registry.find_image_prompt(name)
        digest, path, files = self._located(file)
        known_name = self._names.setdefault(digest, name_of_file(file.path))
        ref = ImagePromptRef(known_name, path, digest, 1.0, images=images, files=files)
        plan = self.opened(ref).plan
        kind, found = plan.kind, None
        count = images
        if kind.use is None:
            if encoder:
                raise unusable_field(
                    "image_prompts.encoder", encoder, f"no value: {kind.title} {name!r} reads no image"
                )
            count = 0
        else:
            found = self._encoder(name, plan.state_width, kind.use, encoder)
        is_plus = kind.use is not None
        appended = images * (plan.tokens or self._states(found, kind.use)) if kind.appends else 0
        ref = replace(
            ref,
            images=count,
            face_version=0 if not kind.reads_face else 2 if is_plus and _VERSION_2 in file.path.name.lower() else 1,
            blank=kind.use is VisionEncoderUse.PENULTIMATE,
            appended=appended,
        )
        return FoundImagePrompt(ref, found, "" if kind.use is None else kind.use.value, plan.face_width)

    def encoder_for(self, model: ModelRef, encoder: str = "") -> ModelRef:
        """Return the vision encoder of the embeddings that `model` reads by itself: the one named `encoder`; without a
        name the one in the model's file, else the only registered one that fits. Raises as `find`."""
        opened = self._open_model(model)
        facts = opened.checkpoint.family.sampling
        module = opened.component(Role.DIFFUSION_MODEL).built.module
        width = pooled_width(facts.size_conditions, module)
        if facts.seen_as is SeenAs.STATES:
            width = int(module.config.clip_image_in_channels)  # type: ignore[union-attr, arg-type] # not typed
        if not encoder and self._width(model, VisionEncoderUse.CENTER_PROJECTED) == width:
            return model
        return self._encoder(model.name, width, VisionEncoderUse.CENTER_PROJECTED, encoder)

    def use_with(self, model: ModelRef, prompt: ImagePromptRef) -> tuple[ComponentSpec, ComponentUse]:
        """Return the size of an adapter, and what a run with `model` needs of it. Raises CorruptFile,
        UnknownArchitecture, or UnusableField for one that was trained for other models."""
        opened = self.opened(prompt)
        if prompt.masks and opened.plan.kind.blocks is not None:
            why = f"{opened.plan.kind.title}, which acts everywhere"
            raise UnusableField(f"image_prompts.mask: not supported by adapter {prompt.name!r}: {why}")
        opened.check_fits(self._open_model(model))
        return with_fetch(opened.spec(), prompt.files), opened.use()

    def opened(self, prompt: ImagePromptRef) -> OpenImagePrompt:
        """Return the adapter, built. Raises CorruptFile or UnknownArchitecture."""
        described = replace(prompt, path=self._registry.described_path(prompt.path))
        return self._opened.get(prompt.content, lambda: OpenImagePrompt(described, self._device))

    def _encoder(self, name: str, width: int, use: VisionEncoderUse, encoder: str) -> ModelRef:
        if encoder:
            found = self._encoder_ref(self._registry.find_vision_encoder(encoder))
            if (own := self._width(found, use)) != width:
                expected = f"a vision encoder with states of width {width}, which {name!r} reads"
                raise unusable_field("image_prompts.encoder", f"{encoder!r} with states of width {own}", expected)
            return found
        fitting: dict[str, ModelRef] = {}
        for _, file in self._registry.files(VISION_ENCODERS):
            # by the header: a hash reads all of a file
            if not self._may_have_width(file, width):
                continue
            try:
                ref = self._encoder_ref(file)
                if self._width(ref, use) == width:
                    fitting.setdefault(ref.sha256, ref)
            except UserError:
                continue  # a file that cannot be read fits nothing
        if len(fitting) == 1:
            return next(iter(fitting.values()))
        names = ", ".join(sorted(repr(ref.name) for ref in fitting.values()))
        expected = f"the name of a vision encoder with states of width {width}, which {name!r} reads"
        raise unusable_field(
            "image_prompts.encoder", f"none, and {len(fitting)} that fit ({names or 'none'})", expected
        )

    def _may_have_width(self, file: WeightsFile, width: int) -> bool:
        """Whether a vision encoder may have outputs of this width, by its header. False for one that cannot be read."""

        def read() -> frozenset[int] | None:
            if self._registry.facts(file).problem:
                return None
            return states_widths(weight_shapes(read_weights_header(file.source, allow_pickle=True)))

        try:
            widths = self._widths.get((file.path, file.fingerprint), read)
        except UserError:
            return False
        return widths is not None and (not widths or width in widths)

    def _encoder_ref(self, file: WeightsFile) -> ModelRef:
        digest, path, files = self._located(file)
        name = name_of_file(file.path)
        if name in _GENERIC:
            name = f"{file.path.parent.name}/{name}"
        return ModelRef(self._names.setdefault(digest, name), path, digest, files=files)

    def _located(self, file: WeightsFile) -> tuple[str, str, tuple[RemoteFile, ...]]:
        digest = self._registry.hashes(file).sha256
        return (digest, *self._registry.locate(file))

    def _width(self, encoder: ModelRef, use: VisionEncoderUse) -> int:
        """Return the width of the states of an encoder; 0 if it has no such output."""
        opened = self._open_model(encoder)
        if Role.VISION_ENCODER not in opened.checkpoint.roles:
            return 0
        module = opened.component(Role.VISION_ENCODER).built.module
        if use is VisionEncoderUse.CENTER_PROJECTED and not hasattr(module, "visual_projection"):
            return 0
        return states_shape(module, use)[1]

    def _states(self, encoder: ModelRef | None, use: VisionEncoderUse | None) -> int:
        assert encoder is not None, "an adapter that appends reads images"
        assert use is not None, "an adapter that appends reads images"
        return states_shape(self._open_model(encoder).component(Role.VISION_ENCODER).built.module, use)[0]
