"""The module that a training loop calls: one rank's part of a plan, which behaves as the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from shardc.runtime import checkpoint
from shardc.runtime.batch import Batch, check_same_batch, prepare_batch
from shardc.runtime.collectives import all_gather_invariant, all_reduce
from shardc.runtime.errors import ShardcError
from shardc.runtime.pipeline import Pipeline, stage_inputs
from shardc.runtime.spec import PlanSpec
from shardc.runtime.state import Kept, TrainingState


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
        state: TrainingState,
        folder: Path,
    ):
        """parameters: this rank's, by canonical name. state: where they and their gradients are."""
        super().__init__()
        self.spec, self.pipeline, self.mesh, self.folder = spec, pipeline, pipeline.mesh, folder
        self.local_parameters = {name: parameters[name] for name in sorted(parameters)}
        self.count_targets, self.state = count_targets, state
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
        # Where calls meet, the number of this batch's parts must not decide: other dp ranks may have more.
        staged = len(self.spec.stages) > 1 or (self.state.calls_meet and self.pipeline.schedule.num_microbatches > 1)
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
        with self.state.collect(len(batches)) as kept:
            results = self.pipeline.run(batches, num_targets, backward=True)
        trigger = torch.zeros((), device=self.mesh.device, requires_grad=True)
        return _LossOfKeptGradients.apply(trigger, self._global_loss([result.loss for result in results]), kept)

    def _evaluate(self, batch: Batch, batches: Sequence[Batch], num_targets: Tensor | None) -> Output:
        """Forward only; logits are gathered over tp and sent to all stages."""
        with self.state.hold():
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
        """Complete the gradients once before an optimizer step: over partial tp axes, tied stages and dp."""
        self.state.reduce_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        super().zero_grad(set_to_none)
        self.state.zero_grad()

    def grad_norm(self) -> Tensor:
        """0-d float32, equal on every rank: 2-norm of the whole model's gradient, after reduce_gradients."""
        return self.state.grad_norm()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that grad_norm is at most max_norm; returns the norm before."""
        norm = self.grad_norm()
        self.state.scale_gradients((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def gather_parameters(self) -> dict[str, Tensor]:
        """Full parameters by Hugging Face name on rank 0's CPU, {} elsewhere. Every rank calls it."""
        return dict(checkpoint.gather(self.state.parameter, self.spec, self.mesh, self.pipeline.schedule))

    def gather_gradients(self) -> dict[str, Tensor]:
        """Full gradients, as gather_parameters; a parameter without gradient is left out."""
        return dict(checkpoint.gather(self.state.gradient, self.spec, self.mesh, self.pipeline.schedule))

    def save_pretrained(self, folder: str | Path, *, max_shard_bytes: int = 5 * 10**9) -> None:
        """Write a Hugging Face folder that from_pretrained opens. Every rank calls it; see checkpoint."""
        pieces = checkpoint.gather(self.state.parameter, self.spec, self.mesh, self.pipeline.schedule)
        checkpoint.save_pretrained(Path(folder), pieces, self.spec, self.mesh, self.folder, max_shard_bytes)


class _LossOfKeptGradients(torch.autograd.Function):
    """The loss, whose backward releases the gradients of its call. trigger: a leaf that makes the loss require grad."""

    @staticmethod
    def forward(ctx: FunctionCtx, trigger: Tensor, loss: Tensor, kept: Kept) -> Tensor:
        ctx.kept = kept
        return loss.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[None, None, None]:
        ctx.kept.release(grad)
        return None, None, None
