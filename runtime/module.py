"""The module that a training loop calls: one rank's part of a plan, which behaves as the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from shardc.runtime import checkpoint, gradients
from shardc.runtime.batch import Batch, check_same_batch, prepare_batch
from shardc.runtime.collectives import all_gather_invariant, all_reduce
from shardc.runtime.errors import ShardcError
from shardc.runtime.memory import MemoryEngine
from shardc.runtime.memory.chunk import Chunk
from shardc.runtime.pipeline import Pipeline, stage_inputs
from shardc.runtime.spec import PlanSpec


class Output:
    """What a call returns: .loss, a 0-d tensor equal on every rank or None, and .logits."""

    __slots__ = ("_logits", "loss")

    def __init__(self, loss: Tensor | None, logits: Tensor | None):
        self.loss = loss
        self._logits = logits

    @property
    def logits(self) -> Tensor:
        """(B, T, V), equal on every rank; it was gathered in the call. Raises ShardcError where it was not."""
        if self._logits is None:
            raise ShardcError(
                "logits are not gathered while gradients are on, because ranks and stages hold parts of them",
                "call the model under torch.no_grad() for logits; gradients exist through .loss only",
            )
        return self._logits

    def __repr__(self) -> str:
        return f"Output(loss={self.loss})"


class PlanModule(nn.Module):
    """This rank's stages of a plan. Parameters are local shards under their Hugging Face names."""

    def __init__(
        self,
        *,
        spec: PlanSpec,
        pipeline: Pipeline,
        parameters: Mapping[str, nn.Parameter],
        count_targets: Callable[[Tensor], Tensor],
        tie_groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        folder: Path,
        memory: MemoryEngine | None = None,
    ):
        """parameters: this rank's, by canonical name. tie_groups: process group of the stages that share a tie."""
        super().__init__()
        self.spec, self.pipeline, self.mesh, self.folder = spec, pipeline, pipeline.mesh, folder
        self.local_parameters = {name: parameters[name] for name in sorted(parameters)}
        self.count_targets, self.tie_groups = count_targets, tie_groups
        self.memory = memory
        self.saw_batch = False
        self.stages = nn.ModuleDict({str(index): stage for index, stage in pipeline.modules.items()})

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Local shards under Hugging Face names."""
        yield from self._named(nn.Module.named_parameters, prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Buffers under Hugging Face names."""
        yield from self._named(nn.Module.named_buffers, prefix, recurse, remove_duplicate)

    def _named(self, list_of: Callable, prefix: str, recurse: bool, remove_duplicate: bool) -> Iterator:
        seen: set[int] = set()
        for stage in self.stages.values():
            for name, tensor in list_of(stage, prefix, recurse, remove_duplicate):
                if remove_duplicate and id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                yield name, tensor

    def forward(self, *, num_items_in_batch: int | Tensor | None = None, **inputs: Any) -> Output:
        """One call on this dp rank's batch; all ranks of a model replica pass the same, which the first call checks.

        inputs: the plan's batch keywords, on any device. num_items_in_batch: divides the summed loss instead of the
        number of targets in the call's global batch. The loss is over the global batch. With gradients on and more
        than one stage or micro-batch, forward and backward of all micro-batches run here, and loss.backward() adds the
        kept gradients, times its own, to .grad; a result that is never given to backward leaves .grad as it was.
        """
        batch = prepare_batch(inputs, self.spec)
        if not self.saw_batch:
            check_same_batch(batch, self.spec, self.mesh)
            self.saw_batch = True
        labels = batch.tensors.get("labels")
        # Not the number of this batch's parts: with sharded parameters all dp ranks must go the same way.
        staged = len(self.spec.stages) > 1 or (self.memory is not None and self.pipeline.schedule.num_microbatches > 1)
        if labels is None and torch.is_grad_enabled() and staged:
            raise ShardcError(
                f"{self.spec.model}: no labels, so no loss; {len(self.spec.stages)} stages keep no graph of logits",
                "pass labels=, or call the model under torch.no_grad()",
            )
        num_targets = None if labels is None else self._num_targets(labels, num_items_in_batch)
        batches = batch.to(self.mesh.device).split(self.pipeline.schedule.num_microbatches)
        if not torch.is_grad_enabled():
            return self._evaluate(batch, batches, num_targets)
        if staged or (len(batches) > 1 and labels is not None):
            assert num_targets is not None
            return Output(self._train(batches, num_targets), None)
        return self._plain(batch, batches, num_targets)

    def _num_targets(self, labels: Tensor, num_items: int | Tensor | None) -> Tensor:
        """0-d float32 on the device: what the sum of the token losses is divided by."""
        if num_items is not None:
            return torch.as_tensor(num_items, dtype=torch.float32).to(self.mesh.device)
        count = self.count_targets(labels).to(self.mesh.device)
        if self.mesh.dp.group is not None:
            dist.all_reduce(count, group=self.mesh.dp.group)
        return count.to(torch.float32)

    def _plain(self, batch: Batch, batches: Sequence[Batch], num_targets: Tensor | None) -> Output:
        """One stage, one micro-batch: autograd as usual. The loss is summed over dp, its gradient stays this rank's."""
        (stage,), (spec,) = self.pipeline.modules.values(), self.spec.stages
        results = [stage(**stage_inputs(spec, part, num_targets)) for part in batches]
        loss = None if num_targets is None else all_reduce(results[0][0], self.mesh.dp)
        if self.mesh.tp.size > 1:
            return Output(loss, None)
        return Output(loss, torch.cat([logits for _, logits in results])[:, : batch.true_length])

    def _train(self, batches: Sequence[Batch], num_targets: Tensor) -> Tensor:
        """Forward and backward of all micro-batches; the gradients are kept until the loss is given to backward."""
        if self.memory is None:
            kept = KeptGradients([p for p in self.local_parameters.values() if p.requires_grad])
        else:
            kept = KeptChunks(self.memory)
        with kept.collect(len(batches)):
            results = self.pipeline.run(batches, num_targets, backward=True)
        trigger = torch.zeros((), device=self.mesh.device, requires_grad=True)
        return _LossOfKeptGradients.apply(trigger, self._global_loss([result.loss for result in results]), kept)

    def _evaluate(self, batch: Batch, batches: Sequence[Batch], num_targets: Tensor | None) -> Output:
        """Forward only; logits are gathered over tp and sent to all stages."""
        with self.memory.hold() if self.memory else nullcontext():
            results = self.pipeline.run(batches, num_targets, backward=False)
        loss = None if num_targets is None else self._global_loss([result.loss for result in results])
        spec = self.spec.stages[-1].logits
        assert spec is not None
        shape = [{"B": batch.rows, "S": batch.length}.get(size, size) for size in spec.shape]
        if results:
            logits = torch.cat([result.logits for result in results]).to(spec.dtype)
            if spec.shard is not None:
                dim, axis = spec.shard
                logits = all_gather_invariant(logits, self.mesh.axis(axis), dim, size=shape[dim])
        else:
            logits = torch.empty(shape, dtype=spec.dtype, device=self.mesh.device)
        if self.mesh.pp.group is not None:
            logits = logits.contiguous()
            last = self.pipeline.schedule.coord_of_stage[len(self.spec.stages) - 1]
            dist.broadcast(logits, group=self.mesh.pp.group, group_src=last)
        return Output(loss, logits[:, : batch.true_length])

    def _global_loss(self, losses: Sequence[Tensor | None]) -> Tensor:
        """Sum over micro-batches and dp, on every rank; losses is empty where the last stage is not."""
        total = torch.zeros((), dtype=torch.promote_types(self.spec.dtype, torch.float32), device=self.mesh.device)
        for loss in losses:
            total += loss
        for axis in (self.mesh.pp, self.mesh.dp):
            if axis.group is not None:
                dist.all_reduce(total, group=axis.group)
        return total

    def reduce_gradients(self) -> None:
        """Complete .grad once before an optimizer step: over partial tp axes, tied stages and dp. See gradients."""
        if self.memory is not None:
            self.memory.end_backward()
            return
        gradients.reduce_gradients(self.local_parameters, self.spec, self.mesh, self.tie_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        super().zero_grad(set_to_none)
        if self.memory is not None:
            self.memory.zero_grad()

    def grad_norm(self) -> Tensor:
        """0-d float32, equal on every rank: 2-norm of the whole model's gradient, after reduce_gradients."""
        if self.memory is not None:
            return self.memory.grad_norm()
        return gradients.grad_norm(self.local_parameters, self.spec, self.mesh, self.pipeline.schedule)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale .grad so that grad_norm is at most max_norm; returns the norm before."""
        norm = self.grad_norm()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if self.memory is not None:
            self.memory.scale_gradients(factor)
        else:
            gradients.scale_gradients(self.local_parameters.values(), factor)
        return norm

    def gather_parameters(self) -> dict[str, Tensor]:
        """Full parameters by Hugging Face name on rank 0's CPU, {} elsewhere. Every rank calls it."""
        return dict(checkpoint.gather(self._parameter, self.spec, self.mesh, self.pipeline.schedule))

    def gather_gradients(self) -> dict[str, Tensor]:
        """Full gradients, as gather_parameters; a parameter without gradient is left out."""
        return dict(checkpoint.gather(self._gradient, self.spec, self.mesh, self.pipeline.schedule))

    def _parameter(self, name: str) -> Tensor | None:
        if self.memory is None or name not in self.local_parameters:
            return self.local_parameters.get(name)
        return self.memory.parameter(name)

    def _gradient(self, name: str) -> Tensor | None:
        if name not in self.local_parameters:
            return None
        return self.local_parameters[name].grad if self.memory is None else self.memory.gradient(name)

    def save_pretrained(self, folder: str | Path, *, max_shard_bytes: int = 5 * 10**9) -> None:
        """Write a Hugging Face folder that from_pretrained opens. Every rank calls it; see checkpoint."""
        pieces = checkpoint.gather(self._parameter, self.spec, self.mesh, self.pipeline.schedule)
        checkpoint.save_pretrained(Path(folder), pieces, self.spec, self.mesh, self.folder, max_shard_bytes)


class KeptGradients:
    """Gradients of one call, aside from .grad until the call's loss is given to backward."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = parameters
        self.grads: list[Tensor | None] | None = None

    @contextmanager
    def collect(self, microbatches: int) -> Iterator[None]:
        """Inside, backward adds to empty gradients, which are kept; .grad is as before afterwards."""
        before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        try:
            yield
            self.grads = [parameter.grad for parameter in self.parameters]
        finally:
            for parameter, grad in zip(self.parameters, before, strict=True):
                parameter.grad = grad

    def release(self, scale: Tensor) -> None:
        """Add the kept gradients times `scale` (0-d) to .grad. Raises ShardcError the second time."""
        if self.grads is None:
            raise ShardcError(
                "backward was called twice on one loss; its gradients were used up",
                "call the model again for each backward",
            )
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            if grad is None:
                continue
            grad.mul_(scale)
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        self.grads = None


class KeptChunks:
    """The same for gradients in chunks: they are reduced in the call already."""

    def __init__(self, memory: MemoryEngine):
        self.memory = memory
        self.reduced: dict[Chunk, Tensor] = {}

    @contextmanager
    def collect(self, microbatches: int) -> Iterator[None]:
        """Inside, backward passes of the micro-batches count as one, and parameters stay gathered."""
        with self.memory.hold(), self.memory.reducer.collect(microbatches) as self.reduced:
            yield

    def release(self, scale: Tensor) -> None:
        """Add the kept gradients times `scale` (0-d) to the totals. Raises ShardcError the second time."""
        self.memory.reducer.release(self.reduced, scale)


class _LossOfKeptGradients(torch.autograd.Function):
    """The loss, whose backward releases the gradients of its call. trigger: a leaf that makes the loss require grad."""

    @staticmethod
    def forward(ctx: FunctionCtx, trigger: Tensor, loss: Tensor, kept: KeptGradients | KeptChunks) -> Tensor:
        ctx.kept = kept
        return loss.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[None, None, None]:
        ctx.kept.release(grad)
        return None, None, None
