"""Run a schedule: forwards and backwards of stages, and the transfers between them.

Shapes of what crosses follow from the plan and the batch, so nothing is negotiated: the sequence may have another
length in each call, and micro-batches may have different numbers of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from shardc.runtime.batch import Batch
from shardc.runtime.mesh import Mesh
from shardc.runtime.schedule import Action, Kind, Schedule
from shardc.runtime.spec import StageSpec, TensorSpec
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

_SENDS = (Kind.SEND_F, Kind.SEND_B)


@dataclass(frozen=True, slots=True)
class StageResult:
    """What the last stage gave for a micro-batch: loss without its graph, logits only from a forward without
    backward."""

    loss: Tensor | None
    logits: Tensor | None


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of this rank and their place in the schedule."""

    modules: Mapping[int, nn.Module]
    specs: Sequence[StageSpec]
    schedule: Schedule
    mesh: Mesh

    def run(self, batches: Sequence[Batch], num_targets: Tensor | None, *, backward: bool) -> list[StageResult]:
        """Run the micro-batches on this rank; returns their results, in order, where the last stage is, else [].

        batches: on this rank's device, the same on all ranks of the pipeline. num_targets: 0-d, handed to the last
        stage. backward: True also runs every backward and adds to .grad of the parameters."""
        call = _Call(self, batches, num_targets, backward)
        steps = self.schedule.steps(self.mesh.pp.coord, num_microbatches=len(batches), backward=backward)
        for step in steps:
            if step[0].kind is Kind.FORWARD:
                call.forward(step[0].stage, step[0].microbatch)
            elif step[0].kind is Kind.BACKWARD:
                call.backward(step[0].stage, step[0].microbatch)
            else:
                call.transfer(step)
        call.finish()
        return [call.results[index] for index in sorted(call.results)]


def stage_inputs(spec: StageSpec, batch: Batch, num_targets: Tensor | None) -> dict[str, Tensor | None]:
    """Keywords that a stage takes from the batch; the last stage also gets num_targets."""
    inputs: dict[str, Tensor | None] = {name: batch.tensors.get(name) for name in spec.batch}
    if spec.logits is not None:
        inputs["num_targets"] = num_targets
    return inputs


class _Call:
    """The tensors in flight during one call. Keys are (stage, micro-batch)."""

    def __init__(self, pipeline: Pipeline, batches: Sequence[Batch], num_targets: Tensor | None, backward: bool):
        self.pipeline, self.batches, self.num_targets, self.with_backward = pipeline, batches, num_targets, backward
        self.results: dict[int, StageResult] = {}
        self.received: dict[tuple[int, int], list[Tensor]] = {}
        self.outputs: dict[tuple[int, int], list[Tensor]] = {}
        # Edges stand for outputs in the graph, so that an output's memory is free once it is sent.
        self.edges: dict[tuple[int, int], list[GradientEdge | None]] = {}
        self.output_grads: dict[tuple[int, int], list[Tensor]] = {}
        self.input_grads: dict[tuple[int, int], list[Tensor]] = {}
        self.arriving: dict[Action, list[dist.Work]] = {}
        self.leaving: list[tuple[dist.Work, Tensor]] = []

    def forward(self, stage: int, microbatch: int) -> None:
        key = (stage, microbatch)
        spec = self.pipeline.specs[stage]
        self._wait(Action(stage, Kind.RECV_F, microbatch))
        received = self.received.get(key, []) if self.with_backward else self.received.pop(key, [])
        for tensor in received:
            tensor.requires_grad_(self.with_backward)
        inputs = stage_inputs(spec, self.batches[microbatch], self.num_targets)
        inputs |= {sent.name: tensor for sent, tensor in zip(spec.receives, received, strict=True)}
        with torch.set_grad_enabled(self.with_backward):
            outputs = self.pipeline.modules[stage](**inputs)
        if spec.logits is not None:
            loss, logits = outputs
            kept_logits = None if self.with_backward else logits
            self.results[microbatch] = StageResult(None if loss is None else loss.detach(), kept_logits)
            outputs = (loss,)
        else:
            self.outputs[key] = [tensor.detach().contiguous() for tensor in outputs]
            self._check_outputs(spec, microbatch, self.outputs[key])
        if self.with_backward:
            self.edges[key] = [get_gradient_edge(out) if out.requires_grad else None for out in outputs]

    def backward(self, stage: int, microbatch: int) -> None:
        key = (stage, microbatch)
        self._wait(Action(stage, Kind.RECV_B, microbatch))
        if self.pipeline.specs[stage].logits is not None:
            loss = self.results[microbatch].loss
            grads = [torch.ones_like(loss)]
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

    def transfer(self, actions: Sequence[Action]) -> None:
        """Start a run of sends and receives together."""
        axis = self.pipeline.mesh.pp
        ops: list[dist.P2POp] = []
        owners: list[Action] = []
        for action in actions:
            toward = action.stage + 1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else action.stage - 1
            coord = self.pipeline.schedule.coord_of_stage[toward]
            if coord == axis.coord:
                self._hand_over(action, toward)
                continue
            sends = action.kind in _SENDS
            tensors = self._take(action) if sends else self._buffers(action)
            operation = dist.isend if sends else dist.irecv
            ops += [dist.P2POp(operation, tensor, group=axis.group, group_peer=coord) for tensor in tensors]
            owners += [action] * len(tensors)
        if not ops:
            return
        works = dist.batch_isend_irecv(ops)
        if len(works) < len(ops):  # NCCL gives one handle for the whole group
            works = works * len(ops)
        self.leaving = [(work, tensor) for work, tensor in self.leaving if not work.is_completed()]
        for op, owner, work in zip(ops, owners, works, strict=True):
            if owner.kind in _SENDS:
                self.leaving.append((work, op.tensor))
            else:
                self.arriving.setdefault(owner, []).append(work)

    def finish(self) -> None:
        """Wait for what is still on its way."""
        for work, _ in self.leaving:
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
        if action.kind is Kind.SEND_F:
            self.received[toward, action.microbatch] = self._take(action)
        elif action.kind is Kind.SEND_B:
            self.output_grads[toward, action.microbatch] = self._take(action)

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
