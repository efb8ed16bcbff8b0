"""Calls of attention by shape: a refusal affects one shape, and the fastest kernel is measured once and kept.

With functions in place of torch's kernels: no CPU has several.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from modelpool.pool.weights.ops.attention import DEFAULT_PRIORITY, AttentionBackend, use_attention_kernels
from modelpool.pool.weights.ops.attention_calls import REFUSALS_KEPT, AttentionKernels, routed, torch_attention
from modelpool.pool.weights.ops.attention_choices import KernelChoices, device_seconds, shape_of
from modelpool.pool.weights.ops.context import compute
from tests.pool.zoo import build

CUDNN, FLASH, EFFICIENT, MATH = DEFAULT_PRIORITY
CPU = torch.device("cpu")
REFUSAL = "cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph."
_NAMES = {0: MATH, 1: FLASH, 2: EFFICIENT, 3: CUDNN}


def first_kernel() -> AttentionBackend:
    """The kernel that torch would try first now."""
    on = {
        CUDNN: torch.backends.cuda.cudnn_sdp_enabled(),
        FLASH: torch.backends.cuda.flash_sdp_enabled(),
        EFFICIENT: torch.backends.cuda.mem_efficient_sdp_enabled(),
        MATH: torch.backends.cuda.math_sdp_enabled(),
    }
    return next(_NAMES[n] for n in torch._C._get_sdp_priority_order() if n in _NAMES and on[_NAMES[n]])


class Card:
    """Attention of a card on which cuDNN refuses some lengths; notes which kernel computed each call."""

    def __init__(self, refused_lengths: tuple[int, ...] = ()) -> None:
        self.refused_lengths = refused_lengths
        self.calls: list[tuple[int, AttentionBackend]] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kernel = first_kernel()
        self.calls.append((query.shape[-2], kernel))
        if kernel is CUDNN and query.shape[-2] in self.refused_lengths:
            raise RuntimeError(REFUSAL)
        return query


def tokens(length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(1, 2, length, 8, dtype=dtype)


def attend(kernels: AttentionKernels, card: Card, length: int, **kwargs: Any) -> AttentionBackend:
    """The kernel that computed a call."""
    q = tokens(length)
    with use_attention_kernels(kernels.order):
        kernels.call(card, q, q, q, **kwargs)
    return card.calls[-1][1]


def test_a_refusal_affects_one_shape() -> None:
    """Found in a review: one refusal dropped cuDNN's kernel for all shapes, and ended the run that met it."""
    kernels, card = AttentionKernels(DEFAULT_PRIORITY), Card((17,))
    assert attend(kernels, card, 16) is CUDNN
    assert attend(kernels, card, 17) is FLASH
    assert card.calls[1:] == [(17, CUDNN), (17, FLASH)]
    assert attend(kernels, card, 17) is FLASH
    assert card.calls[3:] == [(17, FLASH)], "it is not asked again"
    assert attend(kernels, card, 16) is CUDNN
    assert kernels.order == DEFAULT_PRIORITY
    card.refused_lengths = tuple(range(100, 100 + REFUSALS_KEPT + 9))
    for length in card.refused_lengths:
        attend(kernels, card, length)
    assert len(kernels.refused) == REFUSALS_KEPT


@pytest.mark.parametrize("measures", [False, True])
def test_cudnn_computes_no_masks_and_no_grouped_heads(measures: bool) -> None:
    """Found in a review: it reads a mask of another type as the query's, and is wrong for few heads of keys."""
    seconds = dict.fromkeys(DEFAULT_PRIORITY, 9.0) | {CUDNN: 1.0}
    choices = KernelChoices(None, clock(seconds, [])) if measures else None
    kernels, card, q = AttentionKernels(DEFAULT_PRIORITY, choices), Card(), tokens(8)
    masks = (torch.ones(8, 8, dtype=torch.bool), torch.zeros(1, 1, 1, 8), torch.zeros(8, 8, dtype=torch.float16))
    found = [attend(kernels, card, 8), *(attend(kernels, card, 8, attn_mask=mask) for mask in masks)]
    with use_attention_kernels(kernels.order):
        kernels.call(card, q, q[:, :1], q[:, :1], None, 0.0, False, enable_gqa=True)
        kernels.call(card, q, q, q, masks[0])
    found += [kernel for _, kernel in card.calls[-2:]]
    assert [kernel is CUDNN for kernel in found] == [True] + [False] * 5
    assert attend(kernels, card, 8) is CUDNN, "other calls are not affected"


def test_queries_without_visible_keys_reach_no_kernel() -> None:
    """Chroma and HunyuanVideo 1.5 have such rows. Found in a review: some kernels return NaN for them. The result is as
    by torch's kernel on the CPU: zeros."""

    def dividing(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, **_: Any) -> Tensor:
        """A kernel without a case for them."""
        added = attn_mask
        if attn_mask.dtype is torch.bool:
            added = torch.zeros(attn_mask.shape).masked_fill(~attn_mask, -torch.inf)
        return torch.softmax(query @ key.mT / query.shape[-1] ** 0.5 + added, -1) @ value

    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 3, 6, 8) for _ in range(3))
    visible = torch.rand(2, 1, 6, 6) > 0.4
    visible[0, 0, 2] = visible[1, 0, 5] = False
    failures = []
    for name, mask in {
        "of booleans": visible,
        "added": torch.zeros(visible.shape).masked_fill(~visible, -torch.inf),
        "of one row for all": visible[:, :, 2:3],
        "of a head": visible.expand(2, 3, 6, 6).clone(),
        "without batch": visible[0, 0],
        "with a key in each row": visible | torch.eye(6, dtype=torch.bool),
    }.items():
        with use_attention_kernels(DEFAULT_PRIORITY):
            found = AttentionKernels(DEFAULT_PRIORITY).call(dividing, q, k, v, attn_mask=mask)
        expected = torch_attention(q, k, v, attn_mask=mask)
        if not torch.allclose(found, expected, atol=1e-5):
            failures.append(name)
    assert not failures


def test_other_errors_and_refusals_without_another_kernel_are_raised() -> None:
    def broken(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access")

    kernels, q = AttentionKernels(DEFAULT_PRIORITY), tokens(8)
    with pytest.raises(RuntimeError, match="illegal"):
        kernels.call(broken, q, q, q)

    def refuses(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError(REFUSAL)

    for _ in range(2):
        with pytest.raises(RuntimeError, match="No execution plans"):
            kernels.call(refuses, q, q, q)
    assert not kernels.drop_refused(RuntimeError("another"))
    assert kernels.drop_refused(RuntimeError(REFUSAL)), "of a call that was not routed"
    assert kernels.order == DEFAULT_PRIORITY[1:]


def test_calls_of_diffusers_and_transformers_are_routed_and_torchs_function_comes_back() -> None:
    class Noting(AttentionKernels):
        calls = 0

        def call(self, attend: Any, *args: Any, **kwargs: Any) -> Tensor:
            self.calls += 1
            return super().call(attend, *args, **kwargs)

    for family in ("unet", "flux", "clip", "t5"):
        kernels, case = Noting((FLASH, MATH)), build(family)
        with torch.no_grad():
            expected = case.run()
            with compute(CPU, torch.float32, attention=kernels):
                found = case.run()
        assert kernels.calls > 0, family
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert F.scaled_dot_product_attention is torch_attention

    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with routed(AttentionKernels((MATH,))):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with routed(kernels):
        thread.start()
        entered.wait(10)
        before = kernels.calls
        F.scaled_dot_product_attention(tokens(8), tokens(8), tokens(8))
        assert kernels.calls == before + 1, "each thread has its own"
    assert F.scaled_dot_product_attention is not torch_attention, "the other block has not ended"
    F.scaled_dot_product_attention(tokens(8), tokens(8), tokens(8))
    assert kernels.calls == before + 1
    leave.set()
    thread.join()
    assert F.scaled_dot_product_attention is torch_attention


def clock(seconds: dict[AttentionBackend, float], calls: list[AttentionBackend]) -> Callable[..., float]:
    """A clock on which each kernel takes its `seconds`; one that has none does not accept the call."""

    def measure(run: Callable[[], Tensor], _: torch.device) -> float:
        kernel = first_kernel()
        calls.append(kernel)
        run()
        return seconds[kernel]

    return measure


class Accepting(Card):
    """A card on which only some kernels accept calls; some have no memory."""

    def __init__(self, kernels: dict[AttentionBackend, float], full: tuple[AttentionBackend, ...] = ()) -> None:
        super().__init__()
        self.kernels, self.full = kernels, full

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if first_kernel() in self.full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if first_kernel() not in self.kernels:
            raise RuntimeError("No available kernel. Aborting execution.")
        return super().__call__(query, key, value, *args, **kwargs)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({CUDNN: 3.0, FLASH: 2.0, EFFICIENT: 9.0, MATH: 1.0}, FLASH),  # "math" is not measured where another accepts
        ({CUDNN: 3.0, FLASH: 2.9, EFFICIENT: 9.0, MATH: 9.0}, CUDNN),  # too close to tell
        ({EFFICIENT: 3.0, MATH: 1.0}, EFFICIENT),
        ({MATH: 1.0}, MATH),
    ],
)
def test_the_clearly_fastest_kernel_that_accepts_the_call_is_chosen(
    seconds: dict[AttentionBackend, float], expected: AttentionBackend
) -> None:
    asked: list[AttentionBackend] = []
    choices = KernelChoices(None, clock(seconds, asked))
    kernels, card = AttentionKernels(DEFAULT_PRIORITY, choices), Accepting(seconds)
    assert attend(kernels, card, 64) is expected
    measured = len(asked)
    assert attend(kernels, card, 64) is expected
    assert attend(kernels, card, 62 + 2) is expected
    assert len(asked) == measured, "a class of shapes is measured once"
    attend(kernels, card, 65)
    assert len(asked) > measured
    with use_attention_kernels(DEFAULT_PRIORITY):
        assert first_kernel() is CUDNN


def test_a_function_that_the_program_has_put_in_place_is_called_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in a review: on CUDA, runs called torch's function in place of the program's."""
    calls = []

    def own(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(query.shape)
        return query

    with monkeypatch.context() as patching:
        patching.setattr(F, "scaled_dot_product_attention", own)
        with routed(AttentionKernels(DEFAULT_PRIORITY)), routed(AttentionKernels(DEFAULT_PRIORITY)):
            F.scaled_dot_product_attention(tokens(4), tokens(4), tokens(4))
        assert len(calls) == 1
        assert F.scaled_dot_product_attention is own
    with routed(AttentionKernels(DEFAULT_PRIORITY)):
        assert F.scaled_dot_product_attention is not torch_attention
        F.scaled_dot_product_attention = own  # a program that does so during a run
    assert F.scaled_dot_product_attention is own
    F.scaled_dot_product_attention = torch_attention


def test_choices_are_kept_for_the_kind_of_gpu_and_never_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if two processes measure at once, or the file is damaged or full. Without a disk they are in memory."""
    monkeypatch.setenv("MODELPOOL_CACHE_DIR", str(tmp_path))
    opened = KernelChoices.open("NVIDIA H100 80GB HBM3")
    path = opened._file
    assert path is not None
    assert path.name == f"NVIDIA-H100-80GB-HBM3-torch-{version('torch').replace('+', '-')}.txt"
    likes_flash, likes_efficient = {CUDNN: 9.0, FLASH: 1.0}, {CUDNN: 9.0, EFFICIENT: 1.0}
    first = KernelChoices(path, clock(likes_flash, []))
    second = KernelChoices(path, clock(likes_efficient, []))
    for choices, card in ((first, Accepting(likes_flash)), (second, Accepting(likes_efficient))):
        kernels = AttentionKernels((CUDNN, FLASH, EFFICIENT, MATH), choices)
        q = tokens(64)
        run = lambda: card(q, q, q)  # noqa: E731, B023 - called at once
        assert choices.order(shape_of(q, q, q), kernels.order, run)[0] is FLASH, "the first in the file counts"
    asked: list[AttentionBackend] = []
    path.write_text("damaged\nno such kernel\tx\n" + path.read_text())
    third = KernelChoices(path, clock(likes_efficient, asked))
    assert attend(AttentionKernels(DEFAULT_PRIORITY, third), Card(), 64) is FLASH
    assert asked == []
    assert third.order(shape_of(q, q, q), (EFFICIENT, MATH), lambda: q) == (EFFICIENT, MATH), "flash is not usable now"
    full = KernelChoices(path, clock(likes_efficient, asked), limit=1)
    assert attend(AttentionKernels(DEFAULT_PRIORITY, full), Card(), 128) is CUDNN
    assert asked == []
    blocked = KernelChoices(tmp_path / "file" / "x.txt", clock(likes_flash, []))
    (tmp_path / "file").touch()
    assert attend(AttentionKernels(DEFAULT_PRIORITY, blocked), Accepting(likes_flash), 64) is FLASH
    assert blocked.known


def test_nothing_is_chosen_while_memory_is_short() -> None:
    seconds = {CUDNN: 3.0, FLASH: 1.0}
    choices = KernelChoices(None, clock(seconds, []))
    card = Accepting(seconds, full=(FLASH,))
    kernels = AttentionKernels(DEFAULT_PRIORITY, choices)
    assert attend(kernels, card, 64) is CUDNN
    assert choices.known == {}
    card.full = ()
    assert attend(kernels, card, 64) is FLASH


def test_classes_of_shapes_tell_apart_what_kernels_depend_on() -> None:
    q, mask = tokens(64), torch.ones(1, 1, 64, 64, dtype=torch.bool)
    half = tokens(64, torch.float16)
    different = [
        shape_of(q, q, q),
        shape_of(half, half, half),
        shape_of(q, tokens(8), tokens(8)),
        shape_of(q, q, q, mask),
        shape_of(q, q, q, mask[:, :, :1]),
        shape_of(q, q, q, attn_mask=mask.float()),
        shape_of(q, q, q, is_causal=True),
        shape_of(q, q, q, enable_gqa=True),
        shape_of(q[..., :4], q[..., :4], q[..., :4]),
        shape_of(torch.cat([q, q]), q, q),
        shape_of(tokens(65), q, q),
        shape_of(tokens(72), q, q),
    ]
    assert len({shape.class_name for shape in different}) == len(different)
    same = {shape_of(tokens(n), q, q).class_name for n in (4104, 4096 + 512, 5120)}
    assert len(same) == 1


def test_an_error_of_a_call_does_not_keep_its_tensors() -> None:
    """Found in a review: the error was held by a frame of its own traceback. Tensors of a call that ran out of memory
    stayed until the next collection of garbage, when the memory was needed most."""

    def runs_out(*args: Any, **kwargs: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    def failing_call(kernels: AttentionKernels) -> weakref.ref[Tensor]:
        q = tokens(8)
        with pytest.raises(torch.OutOfMemoryError):
            kernels.call(runs_out, q, q, q)
        return weakref.ref(q)

    after_refusal = AttentionKernels(DEFAULT_PRIORITY)
    after_refusal.refused.put(shape_of(tokens(17), tokens(17), tokens(17)), True)
    gc.collect()
    gc.disable()
    try:
        for kernels in (AttentionKernels(DEFAULT_PRIORITY), after_refusal):
            assert failing_call(kernels)() is None
    finally:
        gc.enable()


def test_kernels_are_measured_while_no_other_stream_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in an audit: a decode that overlapped slowed one kernel down and not another, and the choice stays."""
    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self, stream: object) -> None:
            order.append("record")

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: object) -> float:
            return 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("wait"))
    assert device_seconds(lambda: order.append("run"), torch.device("cuda", 0)) == 0.002
    assert order == ["wait", "record", "run", "record"]
