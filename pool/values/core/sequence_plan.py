"""How the tokens of a model are divided among the members of a gang (sequence parallelism). Torch-free.

Each member computes a share of each segment of tokens ("image", "text"). Inside an attention that reads all of them,
members exchange tokens for heads (Ulysses), so that each computes some heads for all tokens, and back. Every member
computes modules that a plan does not name, complete.

Names of modules are below the diffusion model, "" is itself; "*" stands for any one number, "-1" for the last.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """An input of a module of which each member keeps its share of the tokens. Nothing is split if it is None; a
    dimension of 1 is for all tokens, and stays.

    module    its name
    argument  the name of the input: a tensor, or some with equal dimensions; "name.1" is the second of them
    dim       the dimension of the tokens
    segments  the segments of its tokens, one behind the other
    dims      the dimensions of an input that is split so, where there are others; 0: of any
    whole     the dimensions of one that is for all tokens; 0: there is none
    """

    module: str
    argument: str
    dim: int
    segments: tuple[str, ...]
    dims: int = 0
    whole: int = 0


@dataclass(frozen=True, slots=True)
class Gather:
    """An output of a module in which the shares of all members are joined.

    place  of the output, if the module has several
    """

    module: str
    dim: int
    segment: str
    place: int = 0


@dataclass(frozen=True, slots=True)
class SplitAttention:
    """The attention modules that members compute together: each some heads, for all tokens.

    module      their name
    queries     the segments of the queries, in any order; () if every member has all of them
    keys        the segments of the keys
    leaves_out  whether a module leaves out tokens that a mask names, so that members tell each other how many they have
    """

    module: str
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    leaves_out: bool = False


@dataclass(frozen=True, slots=True)
class Undivided:
    """A module that every member computes for all tokens, since it reads them in an order of its own: the shares of its
    input are joined, and each member keeps its share of the output, a tensor with the same dimension of tokens.

    module    its name
    argument  the name of the input
    dim       the dimension of the tokens
    """

    module: str
    argument: str
    dim: int
    segment: str


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """Where the tokens of a model are split and joined, and which attention reads the tokens of all members. Attention
    that is not named reads only what its member has.

    undivided  modules between the first split and the gather that read all tokens

    It holds with a prompt alone, and with the following if they say so:
    reads_images      an image that a video begins with, or that is joined to the latent along its channels
    follows_videos    videos that the model follows, and the images that it takes with them
    reads_references  tokens of reference images beside those of the image
    reads_controls    residuals of ControlNets, which are among its splits
    reads_prompts     image prompts that blocks read in addition
    takes_options     options that act inside of the model
    """

    splits: tuple[Split, ...]
    gathers: tuple[Gather, ...]
    attention: tuple[SplitAttention, ...]
    undivided: tuple[Undivided, ...] = ()
    reads_images: bool = False
    follows_videos: bool = False
    reads_references: bool = False
    reads_controls: bool = False
    reads_prompts: bool = False
    takes_options: bool = False
