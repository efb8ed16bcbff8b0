"""`RunTools`: what the runs of a component use besides its weights, and the context that they run in.

Created when a device is opened; the same for all clones. Knows neither patches nor plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelpool.pool.devices.copy_streams import Event
from modelpool.pool.devices.transfer_pipeline import TransferPipeline
from modelpool.pool.devices.transfers import TransferLedger
from modelpool.pool.devices.uploads import StreamOrder
from modelpool.pool.weights.ops.attention_calls import AttentionKernels
from modelpool.pool.weights.ops.context import LayerKernel, LinearKernel, compute
from modelpool.pool.weights.patcher.compiled_blocks import BlockCompiler
from modelpool.pool.weights.patcher.graphed_calls import GraphStore


@dataclass(slots=True)
class StreamHistory:
    """The order in which the weights of one component streamed in its last run; None if unknown."""

    order: StreamOrder | None = None


@dataclass(frozen=True, slots=True)
class RunTools:
    """Settings and services with which runs of one component compute.

    ledger     records streamed weights, for devices that do not count transfers themselves
    pipeline   brings weights, to stay or for one use; None to copy each synchronously when it is used
    linear     tried first by linear layers; None for torch's arithmetic
    compiler   compiles the repeated blocks of diffusion models; None to compile nothing
    graphs     captures calls of diffusion models; None to capture nothing
    attention  the order of attention kernels; empty for torch's choice. Shared by all components of an engine
    layer      tried first by convolutions, norms and activations; None for torch's arithmetic
    """

    ledger: TransferLedger | None = None
    pipeline: TransferPipeline | None = None
    linear: LinearKernel | None = None
    attention: AttentionKernels = field(default_factory=AttentionKernels)
    compiler: BlockCompiler | None = None
    graphs: GraphStore | None = None
    layer: LayerKernel | None = None

    def works_around(self, error: Exception) -> bool:
        """Leave out the attention kernel that `error` is a refusal of, once. Returns whether another try is worth it.

        Compiled blocks contain the kernel, so nothing is compiled from then on.
        """
        if not self.attention.drop_refused(error):
            return False
        if self.compiler is not None:
            self.compiler.stop(f"they contain an attention kernel that refused a shape ({error})")
        return True

    def bring(self, host: Tensor, device: torch.device) -> Tensor:
        """Return a copy of `host` on `device` that may be kept; `host` itself if it is there."""
        if host.device == device:
            return host
        if self.ledger is not None:
            self.ledger.add_h2d(host.nbytes)
        return host.to(device) if self.pipeline is None else self.pipeline.bring(host)

    def run_mark(self) -> Event | None:
        """As `TransferPipeline.mark`; None without a pipeline."""
        return None if self.pipeline is None else self.pipeline.mark()

    def await_run(self, mark: Event | None) -> None:
        """Let the current stream wait for the run of which `mark` is the end, before its weights are written."""
        if self.pipeline is not None and mark is not None:
            self.pipeline.await_mark(mark)

    def written(self, tensors: Iterable[Tensor]) -> None:
        """Tell the pipeline that weights on the device were written; see `TransferPipeline.written`."""
        if self.pipeline is not None:
            self.pipeline.written(tensors)

    def keep(self, arrived: Iterable[Tensor]) -> None:
        """Mark tensors from `bring` as staying on the device; see `TransferPipeline.keep`."""
        if self.pipeline is not None:
            self.pipeline.keep(arrived)

    @contextmanager
    def computing(
        self,
        device: torch.device,
        dtype: torch.dtype,
        history: StreamHistory | None,
        interrupt: Callable[[], None] | None = None,
        kept_bytes: int = 0,
    ) -> Iterator[None]:
        """Make model calls inside the block compute on `device` in `dtype`. `history` is passed if some weights stream.
        Of small tensors that every pass reads, `kept_bytes` stay on the device; 0: as much as the pipeline has for it.

        The order in which this run streams weights is recorded in it and tells the next run what to prefetch.
        """
        uploader = None
        if self.pipeline is not None and history is not None:
            uploader = self.pipeline.uploader(history.order, kept_bytes)
        try:
            with compute(device, dtype, interrupt, self.ledger, self.linear, self.attention, uploader, self.layer):
                yield
        finally:
            if uploader is not None:
                if history is not None and uploader.order.hosts:
                    history.order = uploader.order
                uploader.close()
