"""The module that a training loop calls: one rank's part of a plan, which behaves as the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from shardc.runtime import checkpoint
from shardc.runtime.batch import Batch, check_same_batch, prepare_batch
from shardc.runtime.collectives import all_reduce
from shardc.runtime.criterion import Criterion, CriterionOfCall
from shardc.runtime.errors import ShardcError
from shardc.runtime.logits import join_rows, logits_on_all_stages, refuse_backward, whole_logits
from shardc.runtime.output import Output
from shardc.runtime.pipeline import Pipeline, stage_inputs
from shardc.runtime.spec import PlanSpec
from shardc.runtime.state import Kept, TrainingState


@dataclass(frozen=True, slots=True)
class _Call:
    """batches: the micro-batches, on the device. num_targets: what their stage losses are divided by, None without
    labels. loss_of: the user's criterion, None is the model's own loss."""

    batch: Batch
    batches: Sequence[Batch]
    num_targets: Sequence[Tensor | None]
    loss_of: CriterionOfCall | None


class PlanModule(nn.Module):
    """This rank's stages of a plan. Parameters are local shards under their Hugging Face names.

    loss_scale: 0-d float32 on the device, by which the caller of fp16 multiplies a loss before backward; one inside a
    call begins with it, so that gradients do not underflow. backward_guard: called when backward reaches a loss or
    logits, before anything is sent. gather_training_logits: whether .logits are gathered while gradients are on.
    """

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
        self.loss_scale: Tensor | None = None
        self.backward_guard: Callable[[], None] | None = None
        self.gather_training_logits = False
        self.saw_batch = False
        self.tried_criterion: Criterion | None = None
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

    def forward(
        self,
        *,
        num_items_in_batch: int | Tensor | None = None,
        criterion: Criterion | None = None,
        **inputs: Any,
    ) -> Output:
        """One call on this dp rank's batch; all ranks of a model replica pass the same, which the first call checks.

        inputs: the plan's batch keywords, on any device. num_items_in_batch: divides the summed loss instead of the
        number of targets in the call's global batch. The loss is over the global batch. With gradients on and more
        than one stage or micro-batch, forward and backward of all micro-batches run here, and loss.backward() adds the
        kept gradients, times its own, to .grad; a result that is never given to backward leaves .grad as it was.

        criterion: (outputs, micro-batch) -> its mean loss, 0-d, in place of the model's own. It runs on every rank of
        the last stage, alike: outputs.logits are whole and not padded, outputs.loss is the model's mean over the
        micro-batch (None without labels), the micro-batch is `inputs` cut to its rows. Shares are weighted by targets,
        without labels by rows; a micro-batch without targets is left out. Where the first call with it fails on one
        rank, it fails on all. Later a rank raises alone, and the launcher must end the others, which wait for it: to
        ask each time would make the host wait for the device.

        .logits are there without gradients; with gradients where one micro-batch's are whole on this rank anyway, or
        by gather_training_logits. A backward through them raises ShardcError, unless this is the only process and
        nothing was split, so that it is exact.
        """
        if torch.is_inference_mode_enabled():
            # What is gathered, and kept for the next training call, must not be an inference tensor.
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(num_items_in_batch=num_items_in_batch, criterion=criterion, **inputs)
        self.state.before_call()
        batch = prepare_batch(inputs, self.spec)
        if not self.saw_batch:
            check_same_batch(batch, self.spec, self.mesh)
            self.saw_batch = True
        has_loss = "labels" in batch.tensors or criterion is not None
        # Where calls meet, the number of this batch's parts must not decide: other dp ranks may have more.
        staged = len(self.spec.stages) > 1 or (self.state.calls_meet and self.pipeline.schedule.num_microbatches > 1)
        if not has_loss and torch.is_grad_enabled() and staged:
            raise ShardcError(
                f"{self.spec.model}: no labels, so no loss; {len(self.spec.stages)} stages keep no graph of logits",
                "pass labels=, or give boost(criterion=...), or call the model under torch.no_grad()",
            )
        call = self._prepare(batch, inputs, criterion, num_items_in_batch)
        if not torch.is_grad_enabled():
            return self._evaluate(call)
        if staged or (len(call.batches) > 1 and has_loss):
            return self._train(call)
        return self._plain(call)

    # -- one call ------------------------------------------------------------------------------------------------------
    def _prepare(
        self, batch: Batch, inputs: Mapping[str, Any], criterion: Criterion | None, num_items: int | Tensor | None
    ) -> _Call:
        batches = batch.to(self.mesh.device).split(self.pipeline.schedule.num_microbatches)
        labels = batch.tensors.get("labels")
        if criterion is not None:
            loss_of = self._criterion(criterion, batch, batches, inputs, num_items)
            counts = torch.tensor(loss_of.counts, dtype=torch.float32).to(self.mesh.device)
            return _Call(batch, batches, [None] * len(batches) if labels is None else counts.unbind(), loss_of)
        num_targets = None if labels is None else self._over_dp(self.count_targets(labels), num_items)
        return _Call(batch, batches, [num_targets] * len(batches), None)

    def _criterion(
        self,
        function: Criterion,
        batch: Batch,
        batches: Sequence[Batch],
        inputs: Mapping[str, Any],
        num_items: int | Tensor | None,
    ) -> CriterionOfCall:
        tensors = {name: value for name, value in inputs.items() if value is not None}
        given = Batch(tensors, batch.rows, batch.true_length, batch.true_length)
        counts = [part.rows for part in batches]
        if "labels" in tensors:  # counted where they are: on the CPU, the host need not wait for the device
            labels = [part.tensors["labels"] for part in given.split(len(batches))]
            counts = torch.stack([self.count_targets(part) for part in labels]).tolist()
        elif num_items is not None:
            raise ShardcError(
                f"{self.spec.model}: num_items_in_batch={num_items} counts targets, and the batch has no labels",
                "pass labels=, or leave num_items_in_batch out",
            )
        is_trial, self.tried_criterion = self.tried_criterion != function, function
        spec = self.spec.stages[-1].logits
        assert spec is not None
        return CriterionOfCall(
            function,
            spec,
            self.mesh,
            batches,
            given=[{**inputs, **part.tensors} for part in given.to(self.mesh.device).split(len(batches))],
            counts=counts,
            total=self._over_dp(torch.tensor(sum(counts)), num_items),
            is_trial=is_trial,
        )

    def _over_dp(self, count: Tensor, num_items: int | Tensor | None) -> Tensor:
        """0-d float32 on the device: what a loss is divided by. count: 0-d, of this dp rank's batch."""
        if num_items is not None:
            return torch.as_tensor(num_items, dtype=torch.float32).to(self.mesh.device)
        count = count.to(self.mesh.device)
        if self.mesh.dp.group is not None:
            dist.all_reduce(count, group=self.mesh.dp.group)
        return count.to(torch.float32)

    def _plain(self, call: _Call) -> Output:
        """One stage, and one micro-batch where there is a loss: autograd as usual.

        The loss is summed over dp, its gradient stays this rank's."""
        (stage,), (spec,) = self.pipeline.modules.values(), self.spec.stages
        inputs = zip(call.batches, call.num_targets, strict=True)
        results = [stage(**stage_inputs(spec, part, num_targets)) for part, num_targets in inputs]
        logits = [logits for _, logits in results]
        loss = results[0][0]
        if call.loss_of is not None:
            loss = call.loss_of(0, loss, logits[0])
            call.loss_of.agree()
        loss = None if loss is None else self._guarded(all_reduce(loss, self.mesh.dp))
        if self.mesh.tp.size == self.mesh.dp.size == 1:
            assert spec.logits is not None
            return Output(loss, self._guarded(whole_logits(join_rows(logits), spec.logits, call.batch, self.mesh)))
        return Output(loss, self._training_logits(call, logits, are_whole=self.mesh.tp.size == 1))

    def _train(self, call: _Call) -> Output:
        """Forward and backward of all micro-batches; the gradients are kept until the loss is given to backward."""
        scale = None if self.loss_scale is None else self.loss_scale.clone()  # steps change it
        with self.state.collect(len(call.batches)) as kept:
            results = self.pipeline.run(
                call.batches,
                call.num_targets,
                backward=True,
                keep_logits=self.gather_training_logits,
                loss_of=call.loss_of,
                loss_scale=scale,
            )
        if call.loss_of is not None:
            call.loss_of.agree()
        trigger = torch.zeros((), device=self.mesh.device, requires_grad=True)
        loss = self._global_loss([result.loss for result in results])
        loss = self._guarded(_LossOfKeptGradients.apply(trigger, loss, kept, scale))
        return Output(loss, self._training_logits(call, [result.logits for result in results], are_whole=False))

    def _evaluate(self, call: _Call) -> Output:
        """Forward only; logits are gathered over tp and sent to all stages."""
        with self.state.hold():
            results = self.pipeline.run(
                call.batches, call.num_targets, backward=False, keep_logits=True, loss_of=call.loss_of
            )
        if call.loss_of is not None:
            call.loss_of.agree()
        has_loss = call.loss_of is not None or call.num_targets[0] is not None
        loss = self._global_loss([result.loss for result in results]) if has_loss else None
        return Output(loss, self._gather_logits(call, [result.logits for result in results]))

    def _gather_logits(self, call: _Call, parts: Sequence[Tensor]) -> Tensor:
        """parts: of the micro-batches, where the last stage is, else empty. All ranks of a model replica call it."""
        spec = self.spec.stages[-1].logits
        assert spec is not None
        last_stage = self.pipeline.schedule.coord_of_stage[len(self.spec.stages) - 1]
        return logits_on_all_stages(parts, spec, call.batch, self.mesh, last_stage=last_stage)

    def _training_logits(self, call: _Call, parts: Sequence[Tensor | None], *, are_whole: bool) -> Tensor | None:
        """To be read beside a loss with gradients; None where they are neither whole on this rank nor asked for."""
        if are_whole or self.gather_training_logits:
            return refuse_backward(self._gather_logits(call, parts))
        return None

    def _guarded(self, tensor: Tensor) -> Tensor:
        """The tensor itself: backward_guard is called when backward reaches it, even where it was changed in place."""
        guard = self.backward_guard
        if guard is not None and tensor.requires_grad:
            tensor.register_hook(lambda _: guard())
        return tensor

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
    """The loss, whose backward releases the gradients of its call. trigger: a leaf that makes the loss require grad.

    scale: 0-d, what the kept gradients were multiplied by already; None is 1."""

    @staticmethod
    def forward(ctx: FunctionCtx, trigger: Tensor, loss: Tensor, kept: Kept, scale: Tensor | None) -> Tensor:
        ctx.kept, ctx.scale = kept, scale
        return loss.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[None, None, None, None]:
        ctx.kept.release(grad if ctx.scale is None else grad / ctx.scale)
        return None, None, None, None
