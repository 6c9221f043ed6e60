"""Run a schedule: forwards and backwards of stages, and the transfers between them.

Shapes of what crosses follow from the plan and the batch, so nothing is negotiated: the sequence may have another
length in each call, and micro-batches may have different numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardc.runtime.batch import Batch
from shardc.runtime.mesh import Mesh
from shardc.runtime.schedule import Action, Kind, Schedule
from shardc.runtime.spec import StageSpec, TensorSpec

# (micro-batch, loss and logits of the last stage) -> the loss that is used in place of the stage's
LossOf = Callable[[int, Tensor | None, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class StageResult:
    """What the last stage gave for a micro-batch, without its graph. logits: None where they are not kept."""

    loss: Tensor | None
    logits: Tensor | None


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of this rank and their place in the schedule."""

    modules: Mapping[int, nn.Module]
    specs: Sequence[StageSpec]
    schedule: Schedule
    mesh: Mesh
    links: Mapping[tuple[int, int], dist.ProcessGroup]

    def run(
        self,
        batches: Sequence[Batch],
        num_targets: Sequence[Tensor | None],
        *,
        backward: bool,
        keep_logits: bool = False,
        loss_of: LossOf | None = None,
        loss_scale: Tensor | None = None,
    ) -> list[StageResult]:
        """Run the micro-batches on this rank; returns their results, in order, where the last stage is, else [].

        batches: on this rank's device, the same on all ranks of the pipeline. num_targets: 0-d, of each micro-batch,
        handed to the last stage. backward: True also runs every backward and adds to .grad of the parameters.
        loss_scale: 0-d, multiplies these gradients; None is 1."""
        call = _Call(self, batches, num_targets, backward, keep_logits, loss_of, loss_scale)
        for action in self.schedule.actions(self.mesh.pp.coord, num_microbatches=len(batches), backward=backward):
            if action.kind is Kind.FORWARD:
                call.forward(action.stage, action.microbatch)
            elif action.kind is Kind.BACKWARD:
                call.backward(action.stage, action.microbatch)
            else:
                call.transfer(action)
        call.finish()
        return [call.results[index] for index in sorted(call.results)]


def stage_inputs(spec: StageSpec, batch: Batch, num_targets: Tensor | None) -> dict[str, Tensor | bool | None]:
    """Keywords that a stage takes from the batch; the last stage also gets num_targets."""
    inputs: dict[str, Tensor | bool | None] = {name: batch.tensors.get(name) for name in spec.batch}
    if batch.packed is not None:
        inputs["packed"] = batch.packed
    if spec.logits is not None:
        inputs["num_targets"] = num_targets
    return inputs


def open_links(schedule: Schedule, mesh: Mesh) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Process group of each (from, to) link of this rank. Every rank calls it.

    One group a direction: NCCL runs a group's transfers one after another, so that on a shared one a send that waits
    for its receiver would hold up a receive that the receiver waits for."""
    links = {}
    for sender, receiver in schedule.links():
        for dp in range(mesh.dp.size):
            for tp in range(mesh.tp.size):
                group = dist.new_group([mesh.rank_at(dp=dp, pp=pp, tp=tp) for pp in (sender, receiver)])
                if (dp, tp) == (mesh.dp.coord, mesh.tp.coord) and mesh.pp.coord in (sender, receiver):
                    links[sender, receiver] = group
    return links


class _Call:
    """The tensors in flight during one call. Keys are (stage, micro-batch)."""

    def __init__(
        self,
        pipeline: Pipeline,
        batches: Sequence[Batch],
        num_targets: Sequence[Tensor | None],
        backward: bool,
        keep_logits: bool,
        loss_of: LossOf | None,
        loss_scale: Tensor | None,
    ):
        self.pipeline, self.batches, self.num_targets, self.with_backward = pipeline, batches, num_targets, backward
        self.keep_logits, self.loss_of, self.loss_scale = keep_logits, loss_of, loss_scale
        self.results: dict[int, StageResult] = {}
        self.received: dict[tuple[int, int], list[Tensor]] = {}
        self.outputs: dict[tuple[int, int], list[Tensor]] = {}
        # Edges stand for outputs in the graph, so that an output's memory is free once it is sent.
        self.edges: dict[tuple[int, int], list[GradientEdge | None]] = {}
        self.output_grads: dict[tuple[int, int], list[Tensor]] = {}
        self.input_grads: dict[tuple[int, int], list[Tensor]] = {}
        self.arriving: dict[Action, list[dist.Work]] = {}
        self.leaving: list[tuple[list[dist.Work], list[Tensor]]] = []

    def forward(self, stage: int, microbatch: int) -> None:
        key = (stage, microbatch)
        spec = self.pipeline.specs[stage]
        self._wait(Action(stage, Kind.RECV_F, microbatch))
        received = self.received.get(key, []) if self.with_backward else self.received.pop(key, [])
        for tensor in received:
            tensor.requires_grad_(self.with_backward)
        inputs = stage_inputs(spec, self.batches[microbatch], self.num_targets[microbatch])
        inputs |= {sent.name: tensor for sent, tensor in zip(spec.receives, received, strict=True)}
        with torch.set_grad_enabled(self.with_backward):
            outputs = self.pipeline.modules[stage](**inputs)
            if spec.logits is not None:
                outputs = (self._finish(microbatch, *outputs),)
        if spec.logits is None:
            self.outputs[key] = [tensor.detach().contiguous() for tensor in outputs]
            self._check_outputs(spec, microbatch, self.outputs[key])
        if self.with_backward:
            self.edges[key] = [get_gradient_edge(out) if out.requires_grad else None for out in outputs]

    def _finish(self, microbatch: int, loss: Tensor | None, logits: Tensor) -> Tensor | None:
        """Note what the last stage returned; returns the loss."""
        if self.loss_of is not None:
            loss = self.loss_of(microbatch, loss, logits)
        kept_logits = logits.detach() if self.keep_logits else None
        self.results[microbatch] = StageResult(None if loss is None else loss.detach(), kept_logits)
        return loss

    def backward(self, stage: int, microbatch: int) -> None:
        key = (stage, microbatch)
        self._wait(Action(stage, Kind.RECV_B, microbatch))
        if self.pipeline.specs[stage].logits is not None:
            loss = self.results[microbatch].loss
            grads = [torch.ones_like(loss) if self.loss_scale is None else self.loss_scale.to(loss.dtype)]
        else:
            grads = self.output_grads.pop(key)
        edges = self.edges.pop(key)
        # A frozen stage gives outputs without a graph: their gradients arrive like any others, and end here.
        pairs = [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if edge is not None]
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
        received = self.received.pop(key, [])
        if received:
            self.input_grads[key] = [torch.zeros_like(x) if x.grad is None else x.grad.contiguous() for x in received]

    def transfer(self, action: Action) -> None:
        """Start a send or a receive."""
        here = self.pipeline.mesh.pp.coord
        toward = action.stage + 1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else action.stage - 1
        there = self.pipeline.schedule.coord_of_stage[toward]
        sends = action.kind in (Kind.SEND_F, Kind.SEND_B)
        if there == here:
            if sends:
                self._hand_over(action, toward)
            return
        tensors = self._take(action) if sends else self._buffers(action)
        group = self.pipeline.links[(here, there) if sends else (there, here)]
        peer = dist.get_global_rank(group, int(dist.get_rank(group) == 0))
        operation = dist.isend if sends else dist.irecv
        works = dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, group) for tensor in tensors])
        if sends:
            # Activations are freed as soon as they have left.
            self.leaving = [(work, kept) for work, kept in self.leaving if not all(w.is_completed() for w in work)]
            self.leaving.append((works, tensors))
        else:
            self.arriving[action] = works

    def finish(self) -> None:
        """Wait for what is still on its way."""
        for works, _ in self.leaving:
            for work in works:
                work.wait()
        assert not (self.received or self.outputs or self.edges or self.input_grads), "the schedule left work undone"

    def _take(self, action: Action) -> list[Tensor]:
        waiting = self.outputs if action.kind is Kind.SEND_F else self.input_grads
        return waiting.pop((action.stage, action.microbatch))

    def _buffers(self, action: Action) -> list[Tensor]:
        spec = self.pipeline.specs[action.stage]
        forward = action.kind is Kind.RECV_F
        buffers = [self._empty(sent, action.microbatch) for sent in (spec.receives if forward else spec.sends)]
        (self.received if forward else self.output_grads)[action.stage, action.microbatch] = buffers
        return buffers

    def _hand_over(self, action: Action, toward: int) -> None:
        """Both stages are on this rank: nothing is sent."""
        waiting = self.received if action.kind is Kind.SEND_F else self.output_grads
        waiting[toward, action.microbatch] = self._take(action)

    def _sizes(self, sent: TensorSpec, microbatch: int) -> tuple[int, ...]:
        batch = self.batches[microbatch]
        return sent.sizes(rows=batch.rows, length=batch.length, tp=self.pipeline.mesh.tp.size)

    def _empty(self, sent: TensorSpec, microbatch: int) -> Tensor:
        return torch.empty(self._sizes(sent, microbatch), dtype=sent.dtype, device=self.pipeline.mesh.device)

    def _wait(self, action: Action) -> None:
        for work in self.arriving.pop(action, []):
            work.wait()

    def _check_outputs(self, spec: StageSpec, microbatch: int, outputs: Sequence[Tensor]) -> None:
        for sent, tensor in zip(spec.sends, outputs, strict=True):
            expected = self._sizes(sent, microbatch), sent.dtype
            found = tuple(tensor.shape), tensor.dtype
            assert found == expected, f"stage {spec.index} sends {sent.name}: {found} where the plan says {expected}"
