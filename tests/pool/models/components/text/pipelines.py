"""What the pipelines of diffusers tell their models of a prompt, on tiny modules: one function for each family.

`PIPELINES` has them with the modules and the tokenizers that each takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from transformers import ByT5Tokenizer, CLIPTokenizer

from modelpool.pool.models.text.clip_tokenizer import ClipTokenizer, build_vocabulary, read_merges
from modelpool.pool.models.text.text_tokenizer import TextTokenizer
from modelpool.pool.models.text.tokenizer_files import find_tokenizer
from tests.pool.models.components.text import cases
from tests.pool.models.text.tiny_tokenizers import for_transformers, tiny

CPU = torch.device("cpu")
#: Qwen 3's, as tokenizer_config.json of Qwen/Qwen3-4B words a lone message
QWEN3_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
#: Mistral Small 3's, for a system prompt and a lone message
MISTRAL_CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content[0].text }}"
    "[/SYSTEM_PROMPT]{% else %}[INST]{{ m.content[0].text }}[/INST]{% endif %}{% endfor %}"
)


@cache
def clip_tokenizer(pad: str) -> CLIPTokenizer:
    merges = read_merges()
    return CLIPTokenizer(vocab=build_vocabulary(merges), merges=merges, pad_token=pad, model_max_length=77)


L, G = "<|endoftext|>", "!"


@cache
def ours_clip() -> ClipTokenizer:
    return ClipTokenizer.load()


def ours(kind: str) -> TextTokenizer:
    if kind == "byt5":
        return find_tokenizer(kind, 384)
    return TextTokenizer(tiny(kind), kind)


def words(kind: str) -> int:
    return int(tiny(kind).get_vocab_size())


@dataclass(frozen=True)
class Pipeline:
    """A family: the modules, its tokenizers, and what its pipeline tells its model of a prompt (and a negative)."""

    family: str
    modules: Callable[[], tuple[nn.Module, ...]]
    tokenizers: tuple[str, ...]
    theirs: Callable[[tuple[Any, ...], str, bool], dict[str, Tensor | None]]


def encoded(pipeline: Any, prompt: str, **more: Any) -> Any:
    with torch.no_grad():
        return pipeline.encode_prompt(prompt, device=CPU, **more)


def sd1(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    pipe = diffusers.StableDiffusionPipeline(None, m[0], clip_tokenizer(L), None, None, None, None, None, False)
    found = encoded(pipe, prompt, num_images_per_prompt=1, do_classifier_free_guidance=False)
    return {"context": found[0]}


def sdxl(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    pipe = diffusers.StableDiffusionXLPipeline(
        None, m[0], m[1], clip_tokenizer(L), clip_tokenizer(G), None, None, add_watermarker=False
    )
    found = encoded(pipe, prompt, do_classifier_free_guidance=False)
    return {"context": found[0], "pooled": found[2]}


def cascade(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    pipe = diffusers.StableCascadePriorPipeline(clip_tokenizer(L), m[0], None, None)
    with torch.no_grad():
        found = pipe.encode_prompt(CPU, 1, 1, False, prompt)
    return {"context": found[0], "pooled": found[1][:, 0]}


def sd3(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    pipe = diffusers.StableDiffusion3Pipeline(
        None, None, None, m[0], clip_tokenizer(L), m[1], clip_tokenizer(G), m[2], for_transformers("t5")
    )
    found = encoded(pipe, prompt, prompt_2=None, prompt_3=None, do_classifier_free_guidance=False)
    return {"context": found[0], "pooled": found[2]}


def flux(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    pipe = diffusers.FluxPipeline(None, None, m[0], clip_tokenizer(L), m[1], for_transformers("t5"), None)
    found = encoded(pipe, prompt, prompt_2=None)
    return {"context": found[0], "pooled": found[1]}


def flux2(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    tokenizer = for_transformers("mistral", bos_token="<s>", padding_side="left", chat_template=MISTRAL_CHAT)
    tokenizer.backend_tokenizer.post_processor = None  # the template begins the text itself
    return {"context": encoded(diffusers.Flux2Pipeline(None, None, m[0], tokenizer, None), prompt)[0]}


def klein(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    tokenizer = for_transformers("qwen", chat_template=QWEN3_CHAT)
    return {"context": encoded(diffusers.Flux2KleinPipeline(None, None, m[0], tokenizer, None), prompt)[0]}


def z_image(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    pipe = diffusers.ZImagePipeline(None, None, m[0], for_transformers("qwen", chat_template=QWEN3_CHAT), None)
    found = encoded(pipe, prompt, do_classifier_free_guidance=False)
    return {"context": found[0][0].unsqueeze(0)}


def chroma(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    found = encoded(
        diffusers.ChromaPipeline(None, None, m[0], for_transformers("t5"), None),
        prompt, do_classifier_free_guidance=False,
    )  # fmt: skip
    return {"context": found[0], "context_mask": found[2]}


def aura_flow(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    tokenizer = for_transformers("t5", model_input_names=["input_ids", "attention_mask"])
    found = encoded(
        diffusers.AuraFlowPipeline(tokenizer, m[0], None, None, None), prompt, do_classifier_free_guidance=False
    )
    return {"context": found[0]}


def pixart(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    pipe = diffusers.PixArtAlphaPipeline(for_transformers("t5"), m[0], None, None, None)
    found = encoded(pipe, prompt, do_classifier_free_guidance=False)
    return {"context": found[0], "context_mask": found[1]}


def pixart_sigma(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    pipe = diffusers.PixArtSigmaPipeline(for_transformers("t5"), m[0], None, None, None)
    found = encoded(pipe, prompt, do_classifier_free_guidance=False)
    return {"context": found[0], "context_mask": found[1]}


def hunyuan_dit(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    pipe = diffusers.HunyuanDiTPipeline(
        None, m[0], for_transformers("bert"), None, None, None, None, False, m[1], for_transformers("t5")
    )
    first, second = (
        encoded(pipe, prompt, do_classifier_free_guidance=False, max_sequence_length=tokens, text_encoder_index=i)
        for i, tokens in enumerate((77, 256))
    )
    return {"context": first[0], "context_mask": first[2], "context_2": second[0], "context_2_mask": second[2]}


def hunyuan_video(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    pipe = diffusers.HunyuanVideoPipeline(m[1], for_transformers("llama3"), None, None, None, m[0], clip_tokenizer(L))
    context, pooled, mask = encoded(pipe, prompt)
    return {"context": context, "context_mask": mask, "pooled": pooled}


def hunyuan_image(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    pipe = diffusers.HunyuanImagePipeline(None, None, m[0], for_transformers("qwen"), m[1], ByT5Tokenizer(), None)
    context, mask, second, second_mask = encoded(pipe, prompt)
    return {"context": context, "context_mask": mask, "context_2": second, "context_2_mask": second_mask}


#: Qwen 2.5's, for a system prompt and a lone message
QWEN25_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)


def hunyuan_video_15(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    theirs = diffusers.HunyuanVideo15Pipeline
    defaults = inspect.signature(theirs._get_mllm_prompt_embeds).parameters
    pipe = SimpleNamespace(  # it asks its guider and its VAE for sizes when it is made
        text_encoder=m[0], tokenizer=for_transformers("qwen", chat_template=QWEN25_CHAT), text_encoder_2=m[1],
        tokenizer_2=ByT5Tokenizer(), system_message=defaults["system_message"].default, tokenizer_max_length=1000,
        prompt_template_encode_start_idx=108, tokenizer_2_max_length=256,
        _get_mllm_prompt_embeds=theirs._get_mllm_prompt_embeds, _get_byt5_prompt_embeds=theirs._get_byt5_prompt_embeds,
    )  # fmt: skip
    with torch.no_grad():
        context, mask, second, second_mask = theirs.encode_prompt(pipe, prompt, CPU, torch.float32)
    return {"context": context, "context_mask": mask, "context_2": second, "context_2_mask": second_mask}


def lumina2(m: Sequence[Any], prompt: str, is_negative: bool) -> dict[str, Tensor | None]:
    pipe = diffusers.Lumina2Pipeline(None, None, None, m[0], for_transformers("gemma"))
    if is_negative:
        found = encoded(pipe, "a", negative_prompt=prompt)[2:]
    else:
        found = encoded(pipe, prompt, do_classifier_free_guidance=False)
    return {"context": found[0], "context_mask": found[1]}


def qwen_image(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    context, mask = encoded(
        diffusers.QwenImagePipeline(None, None, m[0], for_transformers("qwen"), None), prompt, max_sequence_length=512
    )
    return {"context": context, "context_mask": mask}


def hidream(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    m[3].config._attn_implementation = "eager"  # theirs asks for attentions too
    pipe = diffusers.HiDreamImagePipeline(
        None, None, m[0], clip_tokenizer(L), m[1], clip_tokenizer(G), m[2],
        for_transformers("t5", model_max_length=512), m[3],
        for_transformers("llama3", eos_token="<|eot_id|>", model_max_length=131072), None,
    )  # fmt: skip
    # CLIPs of 248 places are read 128 tokens at once; these have 77
    pipe._get_clip_prompt_embeds = lambda tokenizer, encoder, prompt, *_: type(pipe)._get_clip_prompt_embeds(
        pipe, tokenizer, encoder, prompt, 77, CPU, torch.float32
    )
    found = encoded(pipe, prompt, prompt_2=None, prompt_3=None, prompt_4=None, do_classifier_free_guidance=False)
    return {"context": found[0], "context_2": found[2].transpose(0, 1), "pooled": found[4]}


def cosmos(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    pipe = diffusers.CosmosTextToWorldPipeline(
        m[0], for_transformers("t5"), None, None, None, safety_checker=nn.Identity()
    )
    return {"context": encoded(pipe, prompt, do_classifier_free_guidance=False)[0]}


def mochi(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    pipe = diffusers.MochiPipeline(None, None, m[0], for_transformers("t5"), None)
    found = encoded(pipe, prompt, do_classifier_free_guidance=False)
    return {"context": found[0], "context_mask": found[1]}


def ltxv(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    found = encoded(
        diffusers.LTXPipeline(None, None, m[0], for_transformers("t5"), None), prompt, do_classifier_free_guidance=False
    )
    return {"context": found[0], "context_mask": found[1]}


def wan(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    pipe = diffusers.WanPipeline(for_transformers("t5"), m[0], None, None)
    found = encoded(pipe, prompt, do_classifier_free_guidance=False, max_sequence_length=512)
    return {"context": found[0]}


class _Projection(nn.Module):
    """Stands for what Stable Audio puts texts through, which is its model's; keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given = torch.zeros(0)

    def forward(self, text_hidden_states: Tensor) -> Any:
        self.given = text_hidden_states
        return SimpleNamespace(text_hidden_states=text_hidden_states)


def stable_audio(m: Sequence[Any], prompt: str, _: bool) -> dict[str, Tensor | None]:
    tokenizer, projection = for_transformers("t5", model_max_length=128), _Projection()
    # it asks its model and its VAE for sizes when it is made
    pipe = SimpleNamespace(text_encoder=m[0], tokenizer=tokenizer, projection_model=projection)
    with torch.no_grad():
        diffusers.StableAudioPipeline.encode_prompt(pipe, prompt, CPU, False)
    mask = tokenizer(prompt, padding="max_length", truncation=True, return_tensors="pt").attention_mask
    return {"context": projection.given, "context_mask": mask}


def _t5() -> tuple[nn.Module, ...]:
    return (cases.t5(words=words("t5")),)


T5, CLIP = ("t5",), ("clip",)
PIPELINES = {
    case.family: case
    for case in (
        Pipeline("sd1", lambda: (cases.clip(),), CLIP, sd1),
        Pipeline("sdxl", lambda: (cases.clip(), cases.clip(act="gelu", projection=24)), CLIP * 2, sdxl),
        Pipeline("stable_cascade", lambda: (cases.clip(act="gelu", projection=24),), CLIP, cascade),
        Pipeline(
            "sd3",
            lambda: (
                cases.clip(projection=16), cases.clip(act="gelu", projection=24), cases.t5(words=words("t5"), width=80),
            ),
            (*CLIP, *CLIP, *T5), sd3,
        ),
        Pipeline("flux", lambda: (cases.clip(), *_t5()), (*CLIP, *T5), flux),
        Pipeline("flux2", lambda: (cases.mistral(words=words("mistral"), layers=31),), ("mistral",), flux2),
        Pipeline("flux2_klein", lambda: (cases.qwen3(words=words("qwen"), layers=28),), ("qwen",), klein),
        Pipeline("z_image", lambda: (cases.qwen3(words=words("qwen")),), ("qwen",), z_image),
        Pipeline("chroma", _t5, T5, chroma),
        Pipeline("aura_flow", lambda: (cases.umt5(words=words("t5")),), T5, aura_flow),
        Pipeline("pixart", _t5, T5, pixart),
        Pipeline("pixart_sigma", _t5, T5, pixart_sigma),
        Pipeline(
            "hunyuan_dit", lambda: (cases.bert(words=words("bert")), cases.t5(words=words("t5"))), ("bert", "t5"),
            hunyuan_dit,
        ),
        Pipeline(
            "hunyuan_video", lambda: (cases.clip(), cases.llama(words=words("llama3"))), ("clip", "llama3"),
            hunyuan_video,
        ),
        Pipeline(
            "hunyuan_image", lambda: (cases.qwen2(words=words("qwen")), cases.t5(heads=6, words=384)),
            ("qwen", "byt5"), hunyuan_image,
        ),
        Pipeline(
            "hunyuan_video_15", lambda: (cases.qwen2(words=words("qwen")), cases.t5(heads=6, words=384)),
            ("qwen", "byt5"), hunyuan_video_15,
        ),
        Pipeline("lumina2", lambda: (cases.gemma2(words=words("gemma")),), ("gemma",), lumina2),
        Pipeline("qwen_image", lambda: (cases.qwen2(words=words("qwen")),), ("qwen",), qwen_image),
        Pipeline(
            "hidream",
            lambda: (
                cases.clip(projection=16), cases.clip(act="gelu", projection=24), *_t5(),
                cases.llama(words=words("llama3")),
            ),
            ("clip", "clip", "t5", "llama3"), hidream,
        ),
        Pipeline("cosmos", lambda: (cases.t5(gated=False, words=words("t5")),), T5, cosmos),
        Pipeline("mochi", _t5, T5, mochi),
        Pipeline("ltxv", _t5, T5, ltxv),
        Pipeline("wan", lambda: (cases.umt5(words=words("t5")),), T5, wan),
        Pipeline("stable_audio", lambda: (cases.t5(gated=False, words=words("t5")),), T5, stable_audio),
    )
}  # fmt: skip
