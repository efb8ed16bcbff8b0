"""What flows between the nodes of a ComfyUI workflow here: descriptions of work, from which requests follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

#: latents of the layers of an image, with the complete image before them, and without
WITH_WHOLE, LAYERS = "with the complete image", "layers"
#: latents of frames with their audio, and of the frames alone
WITH_SOUND, FRAMES = "with sound", "frames"
#: pixels of a side of a cell of latents
CELL_SIDE = 8


@dataclass(frozen=True, slots=True)
class LoraUse:
    """A LoRA and its strengths, on the diffusion model and on the text encoders; or, with `merge` and `blocks` as in
    `LoraRef` of `pool.values.core.refs`, another model."""

    name: str
    strength: float
    text_strength: float
    merge: str = ""
    blocks: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSampling:
    """Settings of a node for the noise levels of a model: their shift, or, for images of `size`, two exponents of which
    one is for small images and one for large ones (`pool.values.core.shift_by_size`)."""

    shift: float = 0.0
    exponents: tuple[float, float] = (0.0, 0.0)
    size: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ModelValue:
    """A diffusion model of the pool, with LoRAs, options of its runs and their settings, and ControlNets and image
    prompts that patch it. `has_vae`: its file has the VAE that it was published with. `guided_by`: the model that
    predicts what guidance moves away from, which is a part of it. `voice_scale`: of the guidance towards a voice."""

    name: str
    loras: tuple[LoraUse, ...] = ()
    options: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    sampling: ModelSampling | None = None
    has_vae: bool = field(default=False, compare=False)
    controls: tuple[ControlUse, ...] = ()
    image_prompts: tuple[ImagePromptUse, ...] = ()
    guided_by: str = ""
    voice_scale: float = 0.0


@dataclass(frozen=True, slots=True)
class ClipValue:
    """Text encoders of the model `name`, or of separate files ("": of whichever model uses them).

    last_layer  that is read, from the end: -1 is the last; None as the model was trained
    padding     the least padding and length of T5's tokens that a node sets
    """

    name: str
    loras: tuple[LoraUse, ...] = ()
    last_layer: int | None = None
    padding: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class VaeValue:
    """The VAE of the model `name`, or of a separate `file`, of whichever model uses it (`name` "")."""

    name: str
    file: str = ""


@dataclass(frozen=True, slots=True)
class ImageScale:
    """A change of the size of an image; exactly one of `size`, `factor`, `pixels` and `sizes` is set.

    method  of ComfyUI's nodes
    size    width and height; one of them is 0 if it follows from the other
    pixels  about as many as the image has afterwards
    sizes   the one with the shape that is most like the image's is taken
    crops   whether sides that are too long are cut off, so that nothing is stretched
    multiple  of pixels that sides of a size after `pixels` are
    """

    method: str
    size: tuple[int, int] | None = None
    factor: float | None = None
    pixels: float | None = None
    sizes: tuple[tuple[int, int], ...] = ()
    crops: bool = False
    multiple: int = 1


@dataclass(frozen=True, slots=True)
class ImagePad:
    """Space around an image, in pixels, and the pixels over which its mask fades inside the image."""

    left: int
    top: int
    right: int
    bottom: int
    feathering: int = 0


@dataclass(frozen=True, slots=True)
class ImageCrop:
    """A part of an image, in pixels from its upper left corner; pixels outside of the image are left out."""

    x: int
    y: int
    width: int
    height: int


def crop_to_cells(width: int, height: int) -> ImageCrop | None:
    """Return the part of an image that the VAE encodes: the centre, in whole cells of latents. None for all of it, and
    for an image smaller than a cell."""
    wide, high = width // CELL_SIDE * CELL_SIDE, height // CELL_SIDE * CELL_SIDE
    if (wide, high) == (width, height) or not wide or not high:
        return None
    return ImageCrop((width - wide) // 2, (height - high) // 2, wide, high)


@dataclass(frozen=True, slots=True)
class ImageNegative:
    """An image with inverted colors."""


ImageStep: TypeAlias = ImageScale | ImagePad | ImageCrop | ImageNegative


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An uploaded image, and the steps that change it. `seen_by` is the vision encoder that reads it, "" for none."""

    name: str
    steps: tuple[ImageStep, ...] = ()
    seen_by: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class MaskFile:
    """A channel of an image as a mask: "A" is inverted, since transparent pixels are regenerated. "pad" is no channel:
    the space around the image, which is its last step."""

    image: ImageFile
    channel: str
    inverted: bool = False
    grown: int = 0


@dataclass(frozen=True, slots=True)
class ControlNetValue:
    """A ControlNet of the pool."""

    name: str
    mode: str = ""


@dataclass(frozen=True, slots=True)
class ControlUse:
    """A ControlNet as it is applied. `mask`: where its image is hidden."""

    net: ControlNetValue
    image: AnyImage
    strength: float
    start: float
    end: float
    mask: AnyMask | None = None

    @property
    def shares_of(self) -> dict[str, str]:
        """The field of a request that says what start and end are shares of: noise levels, as in ComfyUI."""
        return {} if (self.start, self.end) == (0, 1) else {"shares_of": "noise"}


@dataclass(frozen=True, slots=True)
class RegionUse:
    """A text for a part of the image: left, top, width and height in pixels or, `in_shares`, in shares of the image's
    sides, or a mask."""

    text: str
    clip: ClipValue
    box: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0)
    in_shares: bool = True
    mask: MaskFile | None = None
    strength: float = 1.0


@dataclass(frozen=True, slots=True)
class AdapterValue:
    """An IP-Adapter of the pool; with `for_xl`, the one of models of Stable Diffusion XL, and `name` is for ones of
    Stable Diffusion 1."""

    name: str
    for_xl: str | None = None


@dataclass(frozen=True, slots=True)
class ImagePromptUse:
    """A style model of the pool (Redux) or an IP-Adapter, the image that it reads, its strength, and for an IP-Adapter
    the part of the noise levels, the factors of blocks and the mask of the part of the picture in which it acts.

    blocks_of_xl  the factors with models of Stable Diffusion XL; without them `blocks`, if any, are of XL alone
    """

    model: str | AdapterValue
    image: AnyImage
    strength: float
    start: float = 0.0
    end: float = 1.0
    blocks: tuple[tuple[str, float], ...] = ()
    mask: AnyMask | None = None
    blocks_of_xl: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class BoxText:
    """A text in a box of the image, in pixels, and the text encoder that reads it."""

    text: str
    clip: ClipValue
    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class GligenUse:
    """A GLIGEN model of the pool, and the texts in boxes that it reads."""

    model: str
    boxes: tuple[BoxText, ...]


@dataclass(frozen=True, slots=True)
class Unread:
    """What the input `name` of a node says, which a run does not read: it has an equivalent of its own, which may
    differ."""

    node: str
    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class SeenImage:
    """An image that a model varies, or reads next to a text, by a vision encoder: the strength of its embedding, and
    the noise on it, as a share of the levels. `node` is the one that says so."""

    image: AnyImage
    strength: float = 1.0
    noise: float = 0.0
    node: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class TextValue:
    """An encoded text.

    appended    texts that are encoded on their own, and follow it
    is_zero     stands for conditioning that was set to zero
    regions     texts for parts of the image besides it
    is_partial  it has regions only, and no text for the whole image
    references  images that the model reads together with the text
    image_prompts  images with tokens that follow the text's
    changed     it is what an operation makes of other texts, and `text` is empty
    inpainted   the image that an inpainting model reads
    video       what conditions a video besides it
    seen        images that the model varies
    prior       the latents of stage C of Stable Cascade, which stage B reads
    followed    the same in a workflow
    span        the share of the steps in which it acts, from and to
    timed       other texts, each in its share of the steps
    gligen      texts in boxes of the image
    unread      what its nodes say of the run that reads it
    """

    text: str
    clip: ClipValue
    guidance: float | None = None
    controls: tuple[ControlUse, ...] = ()
    is_zero: bool = False
    appended: tuple[str, ...] = ()
    regions: tuple[RegionUse, ...] = ()
    is_partial: bool = False
    references: tuple[AnyImage, ...] = ()
    image_prompts: tuple[ImagePromptUse, ...] = ()
    changed: ChangedText | None = None
    inpainted: InpaintedImage | None = None
    video: VideoUse | None = None
    seen: tuple[SeenImage, ...] = ()
    prior: SampledLatent | None = None
    followed: NodeLatent | None = None
    span: tuple[float, float] = (0.0, 1.0)
    timed: tuple[TextValue, ...] = ()
    gligen: GligenUse | None = None
    unread: tuple[Unread, ...] = field(default=(), compare=False)

    @property
    def all_parts(self) -> tuple[TextValue, ...]:
        """All its texts, each for a share of the steps."""
        return (replace(self, timed=()), *self.timed)

    @property
    def is_timed(self) -> bool:
        """Whether it acts in a part of the steps, or others do."""
        return bool(self.timed) or self.span != (0.0, 1.0)

    def each(self, change: Callable[[TextValue], TextValue]) -> TextValue:
        """Return it with a change of each of its texts."""
        return replace(change(self), timed=tuple(map(change, self.timed))) if self.timed else change(self)

    def at_step(self, step: int, steps: int) -> tuple[TextValue, ...]:
        """Return the texts that act in a step of so many: their share has begun, and has not ended."""
        share = step / steps
        acting = (
            each for each in self.all_parts if each.span[0] <= share and (share < each.span[1] or each.span[1] == 1)
        )
        return tuple(replace(each, span=(0.0, 1.0)) for each in acting)


@dataclass(frozen=True, slots=True)
class BatchPlaces:
    """Which noise the images of a batch have: the first one that of place `first`, and each as the one before, or,
    `is_same`, all the same."""

    first: int = 0
    is_same: bool = False


@dataclass(frozen=True, slots=True)
class NodeImage:
    """Images that a node of the workflow makes.

    count    images of a batch: as many workflows, with seeds that count up
    sampler  the sampler that they come from, for progress; "" for none
    saved    the file that they are saved as, if they are a video
    frames   of each of them, as one value of the workflow; 0 for an image
    seen_by  the vision encoder that reads them, "" for none
    """

    node: str
    count: int = 1
    sampler: str = ""
    saved: SavedAs | None = None
    frames: int = 0
    seen_by: str = field(default="", compare=False)


class UnknownSize:
    """A width or a height that is known when the image is made, and not before."""

    def __str__(self) -> str:
        return "a size that is known when the image is made, and not before"


@dataclass(frozen=True, slots=True)
class NodeMask:
    """A mask that a node of the workflow makes. `count`, `sampler`, `frames` as of `NodeImage`."""

    node: str
    count: int = 1
    sampler: str = ""
    frames: int = 0


@dataclass(frozen=True, slots=True)
class NodeAudio:
    """Audio that a node of the workflow makes. `count`, `sampler` as of `NodeImage`."""

    node: str
    count: int = 1
    sampler: str = ""


@dataclass(frozen=True, slots=True)
class NodeLatent:
    """Latents that a node of the workflow makes.

    model  of which they are; "" for the model that reads them
    mask   where they are regenerated
    image  that they are encoded from, if nothing has changed them since
    count, sampler, frames  as of `NodeImage`
    layers  whether they are the layers of an image: behind the complete image (WITH_WHOLE), or without it (LAYERS)
    video  the frames that they are encoded from, each as an image; a model of videos reads them as one latent
    size   width and height in pixels; (0, 0) if they are known when they are made
    track  of a video with audio: frames and audio as one latent (WITH_SOUND), or the frames of such a latent (FRAMES)
    guides  images that guide the run that begins with it
    uncropped  whether ComfyUI has the frames of guides behind the frames of the video
    sound  the audio that the run keeps which begins with it; None for none
    """

    node: str
    model: str
    mask: AnyMask | None = None
    image: AnyImage | None = None
    count: int = 1
    sampler: str = ""
    frames: int = 0
    size: tuple[int, int] = (0, 0)
    places: BatchPlaces = field(default_factory=lambda: BatchPlaces())
    layers: str = ""
    video: NodeImage | None = None
    track: str = ""
    guides: tuple[GuideUse, ...] = ()
    uncropped: bool = False
    sound: KeptSound | None = None


@dataclass(frozen=True, slots=True)
class GuideUse:
    """An image, or frames, that guide a video at a frame. `vae` is the model of its VAE, "" for the one that samples;
    `is_added`: ComfyUI has it as a frame behind the others; `is_kept`: it guided the run before, and the result of the
    run has it. `cells`: the cells of the latent that the pool has next to the video for it, at frame 0, or for frames;
    `lora`: the LoRA with the downscale factor in its file."""

    image: AnyImage
    frame: int
    strength: float
    vae: str = ""
    is_added: bool = False
    is_kept: bool = False
    cells: int = 0
    lora: str = ""

    @property
    def is_first(self) -> bool:
        """Whether it takes the place of the first frame."""
        return not self.frame and not self.cells

    @property
    def place(self) -> dict[str, Any]:
        """The fields of `Guide` of `actors.request.workflow_fields`."""
        found: dict[str, Any] = {"frame": self.frame, "strength": self.strength}
        found |= {"appended": True} if self.cells and not getattr(self.image, "frames", 0) else {}
        return found | ({"lora": self.lora} if self.lora else {})


@dataclass(frozen=True, slots=True)
class LoraParameters:
    """What the file of an IC-LoRA says of its guides; "": of none."""

    name: str


def is_first_frame(guides: tuple[GuideUse, ...]) -> bool:
    """Whether images that guide a video are the one that it begins with, which a request has as its image."""
    return len(guides) == 1 and guides[0].is_first and guides[0].strength == 1 and not guides[0].is_kept


@dataclass(frozen=True, slots=True)
class NodeSound:
    """The audio of latents of a video that a node of the workflow makes. `model`, `count`, `sampler` as of
    `NodeLatent`. `is_kept`: its noise mask keeps it in the next run."""

    node: str
    model: str
    count: int = 1
    sampler: str = ""
    is_kept: bool = False


@dataclass(frozen=True, slots=True)
class GivenSound:
    """Latents of audio of the user, of its own length, by a VAE. `is_kept`: its noise mask keeps it."""

    audio: NodeAudio
    vae: VaeValue
    is_kept: bool = False

    @property
    def node(self) -> str:
        """The node of the audio."""
        return self.audio.node

    @property
    def count(self) -> int:
        """As of `NodeAudio`."""
        return self.audio.count


#: audio that a run keeps
KeptSound: TypeAlias = NodeSound | GivenSound


@dataclass(frozen=True, slots=True)
class BlankSound:
    """Empty latents of the audio of a video of so many frames, at so many frames per second."""

    frames: int
    rate: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class CameraValue:
    """The path of a camera (`CameraPath` of `actors.request.workflow_fields`), and the video that it is for: width,
    height and frames."""

    motion: str
    speed: float
    focal: tuple[float, float]
    centre: tuple[float, float]
    video: tuple[int, int, int]

    @property
    def path(self) -> dict[str, Any]:
        """The fields of a node of a workflow."""
        numbers = dict(zip(("fx", "fy", "cx", "cy"), (*self.focal, *self.centre), strict=True))
        return {"motion": self.motion, "speed": self.speed, **numbers}


#: a point of a track: x and y in pixels, and 1 where it is seen
TrackPoint: TypeAlias = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class TracksValue:
    """Tracks of points through a video, frame by frame."""

    points: tuple[tuple[TrackPoint, ...], ...]


@dataclass(frozen=True, slots=True)
class VideoUse:
    """What conditions a run besides its text: the image that it reads, or the first and the last image of a video,
    other fields of a request, by name, and videos that it follows; None where a node says nothing. `video_stops`:
    nothing follows the last frame of its video. `first_frames`: the frames that a video begins with, if they are
    several, of which `image` is the first. `prompt_without_image`, `nested`, `tracks`: as of a node that samples.
    `voice`: audio with the voice that its audio has."""

    image: AnyImage | None = None
    last_image: AnyImage | None = None
    others: tuple[tuple[str, Any], ...] = ()
    video: NodeImage | None = None
    video_mask: NodeMask | None = None
    face_video: NodeImage | None = None
    video_stops: bool = False
    first_frames: NodeImage | None = None
    camera: CameraValue | None = None
    prompt_without_image: bool = False
    nested: bool = False
    voice: NodeAudio | None = None
    tracks: Mapping[str, Any] | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of a request that are no images."""
        return dict(self.others)

    def with_more(self, more: VideoUse) -> VideoUse:
        """Return it with what another node says."""
        others = {**dict(self.others), **dict(more.others)}
        return VideoUse(
            more.image or self.image,
            more.last_image or self.last_image,
            tuple(others.items()),
            more.video or self.video,
            more.video_mask or self.video_mask,
            more.face_video or self.face_video,
            more.video_stops or (self.video_stops and more.video is None),
            self.first_frames if more.image is None else more.first_frames,
            more.camera or self.camera,
            more.prompt_without_image or self.prompt_without_image,
            more.nested or self.nested,
            more.voice or self.voice,
            more.tracks or self.tracks,
        )

    def images(self) -> dict[str, AnyImage]:
        """Return the images, by the field of a request."""
        found: dict[str, AnyImage | None] = {"image": self.image, "last_image": self.last_image, "video": self.video}
        found |= {"face_video": self.face_video, "first_frames": self.first_frames}
        return {name: image for name, image in found.items() if image is not None}


@dataclass(frozen=True, slots=True)
class SavedAs:
    """The file of a node that saves a video or audio: its format, frames per second, and quality, 0 for the default."""

    format: str
    frame_rate: float = 0.0
    quality: int = 0

    def fields(self) -> dict[str, Any]:
        """Return the fields of a request for the file."""
        return {"format": self.format} | ({"quality": self.quality} if self.quality else {})


@dataclass(frozen=True, slots=True)
class ChangedText:
    """Encoded texts that an operation changes: its name, settings, and the texts that it reads, by name; and how many
    texts it is made of."""

    operation: str
    texts: tuple[tuple[str, TextValue], ...]
    settings: tuple[tuple[str, float], ...] = ()
    parts: int = 1


@dataclass(frozen=True, slots=True)
class InpaintedImage:
    """The image and the mask that an inpainting model reads."""

    image: AnyImage
    mask: AnyMask


AnyImage: TypeAlias = ImageFile | NodeImage
AnyMask: TypeAlias = MaskFile | NodeMask


@dataclass(frozen=True, slots=True)
class SamplerValue:
    """A sampler, and the settings of a node for its noise; `eta` is None for its default."""

    name: str
    eta: float | None = None
    s_noise: float = 1.0


@dataclass(frozen=True, slots=True)
class NoiseLevels:
    """The noise levels of a run: a schedule of `steps`, of which the last `run_steps` are run, or the levels themselves
    (`sigmas`, without the final 0). `beta` is alpha and beta of the schedule of that name; None for the usual ones. The
    run ends when `last_step` steps are done; 0: all. `first_sigma` takes the place of the first level of a schedule; 0:
    it stays. `model` has the levels that the schedule chooses from; None: the model that is sampled."""

    schedule: str
    steps: int
    run_steps: int
    sigmas: tuple[float, ...] = ()
    beta: tuple[float, float] | None = None
    last_step: int = 0
    first_sigma: float = 0.0
    model: ModelValue | None = None


@dataclass(frozen=True, slots=True)
class GuiderValue:
    """A model with its texts and the scale of the guidance; `sound_cfg` is the one of audio, None for the same."""

    model: ModelValue
    positive: TextValue
    negative: TextValue
    cfg: float
    sound_cfg: float | None = None


@dataclass(frozen=True, slots=True)
class BlankLatent:
    """Empty latents of the size of `width` x `height` pixels, of a video of `frames`; 0 for images, and for sizes that
    follow from an image that conditions the run. `image` is the one that a video begins with, if the latents have it;
    `seconds` are of audio, 0 for images. `layers`: the frames are layers of an image, behind the complete image.
    `stage` is the one of Stable Cascade that reads them, "" for other models. `sound` is the audio that is sampled with
    the frames, `guides` are images that guide the video. `sized_as` is an image of the same size, where it is not known
    otherwise."""

    width: int
    height: int
    count: int
    frames: int = 0
    image: AnyImage | None = None
    seconds: float = 0.0
    places: BatchPlaces = field(default_factory=lambda: BatchPlaces())
    layers: bool = False
    stage: str = ""
    sound: BlankSound | KeptSound | None = None
    guides: tuple[GuideUse, ...] = ()
    sized_as: AnyImage | None = None


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """The latents of an image, and where they are regenerated. `hides`: the image is encoded without these pixels;
    `vae` is the model of the VAE, "" for the one that reads them."""

    image: ImageFile
    mask: MaskFile | None = None
    hides: bool = False
    vae: str = ""


@dataclass(frozen=True, slots=True)
class SampledLatent:
    """The result of a sampler.

    steps      length of its schedule, of which the last `run_steps` are run; with 0, it is its start
    node_id    of the sampler, for progress
    sigmas     noise levels instead of a schedule
    beta       alpha and beta of schedule beta; None for the usual ones
    stopped_at  the step before which it stopped, with the noise that is left; None if it ran to the end
    sound_cfg  the scale of the guidance of audio; None for `cfg`
    """

    model: ModelValue
    positive: TextValue
    negative: TextValue
    seed: int
    steps: int
    run_steps: int
    cfg: float
    sampler: SamplerValue
    schedule: str
    start: LatentValue
    node_id: str
    sigmas: tuple[float, ...] = ()
    beta: tuple[float, float] | None = None
    stopped_at: int | None = None
    sound_cfg: float | None = None


@dataclass(frozen=True, slots=True)
class SampledSound:
    """The audio of sampled latents of a video."""

    latent: SampledLatent


@dataclass(frozen=True, slots=True)
class DecodedSound:
    """The decoded audio of sampled latents of a video."""

    latent: SampledLatent


#: latents of audio that belongs to a video
AUDIO_LATENTS = (BlankSound, GivenSound, NodeSound, SampledSound)


@dataclass(frozen=True, slots=True)
class ScaledLatent:
    """Sampled latents, scaled up by a factor: the latents themselves, or, by `via` "image", their decoded images,
    with an upscaler of the pool or without (""). `method` is the one of the node; "" for none."""

    latent: SampledLatent
    scale: float
    via: Literal["latent", "image"] = "latent"
    upscaler: str = ""
    method: str = ""


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """The images of sampled latents, scaled up by a factor: with an upscaler of the pool, or without (""). `scale` is
    None for the factor of the upscaler, which is not known here. `saved` is the file of a video; `tiles` are fields of
    a request for the tiles of the VAE; `method` is the one by which it is scaled, "" for none."""

    latent: SampledLatent
    scale: float | None = 1.0
    upscaler: str = ""
    saved: SavedAs | None = None
    tiles: tuple[tuple[str, int], ...] = ()
    method: str = ""


AnyLatent: TypeAlias = BlankLatent | NodeLatent
LatentValue: TypeAlias = BlankLatent | EncodedImage | SampledLatent | ScaledLatent
