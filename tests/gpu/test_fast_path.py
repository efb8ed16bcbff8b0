"""Options of the fast path on a real CUDA device: each changes speed, and values within rounding only.

Each feature that `cpu` and `sim` cannot show has a test here, so that one run on a GPU proves all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from modelpool.pool.devices.capabilities import detect_capabilities
from modelpool.pool.devices.kind_names import DeviceKind
from modelpool.pool.ops.attention import attention_priority
from modelpool.pool.ops.attention_calls import AttentionKernels, torch_attention
from modelpool.pool.ops.attention_choices import KernelChoices
from modelpool.pool.ops.context import compute

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


def test_the_measured_attention_kernel_computes_the_same_within_rounding(tmp_path: Path) -> None:
    """For shapes of image and video models; choices are read again, and the order is torch's afterwards."""
    order = attention_priority(detect_capabilities(DeviceKind.CUDA, 0))
    before = list(torch._C._get_sdp_priority_order())
    file = tmp_path / "choices.txt"
    shapes = [(2, 10, 4096, 4096, 64), (2, 20, 1024, 77, 64), (1, 24, 4608, 4608, 128), (1, 1, 4096, 4096, 512)]
    for dtype in (torch.float16, torch.bfloat16):
        kernels = AttentionKernels(order, KernelChoices(file))
        for batch, heads, queries, keys, size in shapes:
            q, k, v = (torch.randn(batch, heads, n, size, device=CUDA, dtype=dtype) for n in (queries, keys, keys))
            expected = torch_attention(q, k, v)
            with compute(CUDA, dtype, attention=kernels):
                found = F.scaled_dot_product_attention(q, k, v)
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert kernels.choices is not None
    assert len(kernels.choices.known) == 2 * len(shapes)
    assert KernelChoices(file).known == kernels.choices.known
    assert list(torch._C._get_sdp_priority_order()) == before
    assert not torch.cuda.is_current_stream_capturing()
