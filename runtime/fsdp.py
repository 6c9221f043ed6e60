"""torch's fully_shard (FSDP2) as a placement: dim 0 of each parameter, its gradient and its master split over dp.

fully_shard gathers a block before it runs and reduces its gradients after it ran backward. This file fills the shards,
shows them to an optimizer as flat local tensors, and keeps the gradients of calls apart.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from shardc.runtime.blocks import blocks_of
from shardc.runtime.errors import ShardcError
from shardc.runtime.gradients import norm_over
from shardc.runtime.mesh import Mesh
from shardc.runtime.pieces import gather_pieces
from shardc.runtime.schedule import Schedule
from shardc.runtime.spec import PlanSpec
from shardc.runtime.state import Kept, Piece, StateOptions, incomplete, used_up
from shardc.runtime.weights import Weights

FSDP = "fsdp"  # the placement's name


def check_layout(spec: PlanSpec) -> None:
    """Raises ShardcError for a plan that fully_shard cannot train: split over tp or pp, or with a 0-d parameter."""
    advice = "use HybridParallelPlugin(zero_stage=3), which is plan.build(placement='zero3')"
    if spec.tp != 1 or len(spec.stages) != 1:
        raise ShardcError(
            f"placement 'fsdp': {spec.model} is compiled for tp={spec.tp}, pp={spec.pp}, {len(spec.stages)} stage(s); "
            "valid: tp=1, pp=1, one stage",
            advice,
        )
    scalars = [name for name, parameter in spec.parameters.items() if not parameter.shape]
    if scalars:
        raise ShardcError(f"placement 'fsdp': {scalars[0]} has no dim that could be split", advice)


class FullyShardedState:
    """Training state of one stage under fully_shard; made by `Plan.build(placement="fsdp")`.

    parameters: DTensors by canonical name, of float32 where masters are kept; a module holds whole tensors in their
    place while they are gathered. Frozen ones keep the plan's dtype. Gradients that low precision parameters collect
    over several calls add up in float32.
    """

    calls_meet = True

    def __init__(
        self,
        stage: nn.Module,
        spec: PlanSpec,
        mesh: Mesh,
        schedule: Schedule,
        weights: Weights,
        device: torch.device,
        options: StateOptions,
    ):
        """stage: the only one, on the meta device. dp has several ranks."""
        groups = options.groups
        if groups is None:
            groups = {name: 0 for name, parameter in spec.parameters.items() if parameter.requires_grad}
        self.stage, self.spec, self.mesh, self.device, self.groups = stage, spec, mesh, device, groups
        self.several_microbatches = schedule.num_microbatches > 1
        self.reshards = options.reshard_after_forward
        master_dtype = torch.promote_types(spec.dtype, torch.float32) if options.master_weights else spec.dtype
        self.places = _places(stage, spec)
        for name, places in self.places.items():
            dtype = master_dtype if name in groups else spec.dtype
            empty = torch.empty(spec.parameters[name].shape, dtype=dtype, device="meta")
            _assign(nn.Parameter(empty, requires_grad=name in groups), places)
        stage.register_forward_hook(self._after_forward)  # before that of fully_shard, which then runs after it
        self.blocks = _separate_blocks(stage, self.places)
        self.parameters = self._shard(options)
        self.shards = {name: _local(parameter).view(-1) for name, parameter in self.parameters.items()}
        self.master_of = {name: nn.Parameter(shard) for name, shard in self.shards.items() if name in groups}
        self.load(weights)
        for unit in self._units:
            unit.register_forward_pre_hook(partial(self._before_forward, self._trained_in(unit)), with_kwargs=True)
        for name in self.master_of:
            self.parameters[name].register_post_accumulate_grad_hook(partial(self._reduced, name))
        self.gradients = _Gradients()
        self.reduces = True  # whether backward passes reduce what they leave
        self._waits = False  # whether gradients wait to be reduced
        self._is_running = False
        self._whole: dict[str, nn.Parameter] = {}  # parameters as modules see them when gathered
        self._zeros: dict[str, Tensor] = {}

    # -- how it is set up ----------------------------------------------------------------------------------------------
    def _shard(self, options: StateOptions) -> dict[str, nn.Parameter]:
        """Apply fully_shard to the blocks and the stage; returns parameters with room for this rank's shards."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # which take a second to import
        from torch.distributed.tensor import DTensor

        # Emitted source writes nothing in place, to views neither.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        dp = DeviceMesh.from_group(self.mesh.dp.group, self.device.type)
        # Inputs are not cast: num_targets and rotary tables are float32.
        policy = MixedPrecisionPolicy(
            param_dtype=self.spec.dtype,
            reduce_dtype=options.communication_dtype or self.spec.dtype,
            cast_forward_inputs=False,
        )
        for unit in self._units:
            # The stage's own parameters are the first that backward needs.
            reshards = self.reshards and unit is not self.stage
            fully_shard(unit, mesh=dp, reshard_after_forward=reshards, mp_policy=policy)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        made = {}
        for name, places in self.places.items():
            owner, leaf = places[0]
            empty = getattr(owner, leaf)
            local = torch.zeros_like(_local(empty), device=self.device)
            layout = {"shape": empty.shape, "stride": empty.stride(), "run_check": False}
            shard = DTensor.from_local(local, dp, empty.placements, **layout)
            made[name] = nn.Parameter(shard, requires_grad=empty.requires_grad)
        known = self.spec.by_any_name()
        names = [name for name, _ in self.stage.named_parameters(remove_duplicate=False)]
        # This is where fully_shard learns of new tensors; it gives uneven ones room up to the longest shard.
        self.stage.load_state_dict({name: made[known[name].name] for name in names}, strict=False, assign=True)
        return made

    @property
    def _units(self) -> list[nn.Module]:
        """What is gathered together: each block, and the stage without its blocks."""
        return [*self.blocks, self.stage]

    def _trained_in(self, unit: nn.Module) -> list[str]:
        inner = set() if unit is not self.stage else {part for block in self.blocks for part in block.modules()}
        modules = set(unit.modules()) - inner
        return [name for name in self.master_of if self.places[name][0][0] in modules]

    def load(self, weights: Weights) -> None:
        """Take other values for all parameters and their masters, one whole parameter in memory at a time."""
        self._reshard()
        with torch.no_grad():
            for name, shard in self.shards.items():
                whole = weights.shard(self.spec.parameters[name], self.mesh.tp, shard.dtype, self.device).reshape(-1)
                start, end = self._range(name, self.mesh.dp.coord)
                shard.copy_(whole[start:end])

    # -- calls ---------------------------------------------------------------------------------------------------------
    def before_call(self) -> None:
        """Parameters can be used at any time."""

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Inside, gathered parameters stay where calls may have several micro-batches; afterwards none is gathered.

        Each unit is then gathered once a call, however many micro-batches this dp rank has."""
        self._reshard_after_forward(self.reshards and not self.several_microbatches)
        try:
            yield
        finally:
            self._reshard_after_forward(self.reshards)
            self._reshard()

    @contextmanager
    def collect(self, microbatches: int) -> Iterator[Kept]:
        """Inside, backward passes add up on this rank, and are reduced at its end."""
        if self._waits:  # what other calls left is not this one's
            self._finish()
        totals, kept = self.gradients, _Kept(self.gradients)
        self.gradients = kept.gradients
        self.stage.set_reshard_after_backward(False)
        try:
            with self.hold(), self.no_sync():
                yield kept
                self._finish()
        finally:
            self.stage.set_reshard_after_backward(True)
            self.gradients = totals

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes leave whole gradients on each rank, which saves traffic and costs their memory."""
        before = self.reduces
        self._reduce_in_backward(False)
        try:
            yield
        finally:
            self._reduce_in_backward(before)

    def _reduce_in_backward(self, reduces: bool) -> None:
        self.reduces = reduces
        self.stage.set_requires_gradient_sync(reduces)

    def _reshard_after_forward(self, reshards: bool) -> None:
        for block in self.blocks:
            block.set_reshard_after_forward(reshards, recurse=False)

    def _reshard(self) -> None:
        for unit in self._units:
            unit.reshard()

    # -- gradients -----------------------------------------------------------------------------------------------------
    def _after_forward(self, _: nn.Module, __: Any, output: Any) -> None:
        for tensor in _with_gradients(output):
            tensor.register_hook(self._begin_backward)

    def _begin_backward(self, _: Tensor) -> None:
        if not self._is_running:
            self._is_running = True
            Variable._execution_engine.queue_callback(self._end_backward)  # before that of fully_shard

    def _end_backward(self) -> None:
        """At the end of a backward pass: fully_shard then reduces units whose inputs need no gradient."""
        self._complete(list(self.master_of))
        self._zeros.clear()
        self._is_running, self._waits = False, not self.reduces

    def _before_forward(self, names: Sequence[str], _: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in _with_gradients((args, kwargs)):
            tensor.register_hook(lambda _: self._complete(names))  # runs when the unit's gradients are there

    def _complete(self, names: Sequence[str]) -> None:
        """Note which parameters have a gradient, and give zeros to the others: ranks must reduce the same ones."""
        for name in names:
            owner, leaf = self.places[name][0]
            parameter = getattr(owner, leaf)
            if parameter is self.parameters[name]:  # not gathered: it was not used, or is reduced already
                continue
            self._whole[name] = parameter
            if parameter.grad is not None:
                if parameter.grad is not self._zeros.get(name):
                    self.gradients.found.add(name)
            elif self.reduces:
                parameter.grad = self._zeros[name] = torch.zeros_like(parameter)

    def _reduced(self, name: str, parameter: nn.Parameter) -> None:
        """fully_shard has this rank's shard of a gradient."""
        self.gradients.add(name, _local(parameter.grad).view(-1))
        parameter.grad = None

    def _finish(self) -> None:
        """Reduce what waits. torch does so at the end of a backward pass, and has no public name for it."""
        for parameter in self._whole.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.stage.set_requires_gradient_sync(True)
        self.stage._get_fsdp_state()._root_post_backward_final_callback()
        self.stage.set_requires_gradient_sync(self.reduces)
        self._waits = False

    def reduce_gradients(self) -> None:
        """Before a step: reduce what waits, forget what no rank has, free what is gathered. Every rank calls it.

        Raises ShardcError after a backward pass that failed."""
        if self._is_running:
            raise incomplete()
        if self._waits:
            self._finish()
        if self.gradients.is_new:
            self._forget_unused()
        self._reshard()

    def _forget_unused(self) -> None:
        """A parameter that autograd reached on no rank has no gradient, as in one process, in place of zeros."""
        names = list(self.master_of)
        # On the CPU where it can be: the host need not wait for the GPU.
        on_cpu = "cpu:" in dist.get_backend_config(self.mesh.dp.group)
        found = torch.tensor([name in self.gradients.found for name in names], dtype=torch.int32)
        found = found if on_cpu else found.to(self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.mesh.dp.group)
        for name, is_found in zip(names, found.tolist(), strict=True):
            if not is_found:
                self.gradients.sums.pop(name, None)
        self.gradients.is_new = False

    def zero_grad(self) -> None:
        """Forget all gradients, those of a backward pass that failed too."""
        if self._is_running:
            self._end_backward()
            self._waits = True  # fully_shard has its own end of the pass still to do
        if self._waits:
            self._finish()
        self.gradients.clear()

    def grad_norm(self) -> Tensor:
        """0-d float32, equal on every rank: 2-norm of the whole gradient."""
        squares = torch.zeros((), dtype=torch.float32, device=self.device)
        for gradient in self.gradients.sums.values():
            wide = torch.promote_types(gradient.dtype, torch.float32)
            squares += torch.linalg.vector_norm(gradient, dtype=wide) ** 2
        return norm_over(squares, [self.mesh.dp])

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all gradients by a 0-d tensor."""
        for gradient in self.gradients.sums.values():
            gradient.mul_(factor.to(gradient.dtype))

    # -- the optimizer -------------------------------------------------------------------------------------------------
    def masters(self, group: int) -> list[nn.Parameter]:
        """This rank's shards of a group's parameters, flat; they share memory with the parameters."""
        return [master for name, master in self.master_of.items() if self.groups[name] == group]

    def step(self, optimizer: torch.optim.Optimizer, scale: Tensor | None = None) -> None:
        """Update the masters, which are the parameters, by an elementwise optimizer over `masters`."""
        stepped = []
        for name, gradient in self.gradients.sums.items():
            master = self.master_of[name]
            if master.numel():
                gradient = gradient.to(master.dtype)
                master.grad = gradient if scale is None else gradient.mul_(scale.to(gradient.dtype))
                stepped.append(master)
        optimizer.step()
        for master in stepped:
            master.grad = None
        self._reshard()

    def publish(self) -> None:
        """The next gather reads the masters."""
        self._reshard()

    # -- what ranks hold -----------------------------------------------------------------------------------------------
    def piece(self, name: str, coord: int | None = None) -> Piece | None:
        """What a dp coord, None is this rank's, holds of a trained parameter's master; None where it holds nothing."""
        if name not in self.master_of:
            return None
        return self._piece(name, self.mesh.dp.coord if coord is None else coord)

    def parameter(self, name: str) -> Tensor | None:
        """A whole parameter, in the plan's dtype, on dp coord 0, None elsewhere. All dp ranks call it."""
        return self._gathered(name, self.shards[name])

    def gradient(self, name: str) -> Tensor | None:
        """Its reduced gradient in the same way, None where it has none."""
        found = self.gradients.sums.get(name)
        return None if found is None else self._gathered(name, found)

    def _range(self, name: str, coord: int) -> tuple[int, int]:
        """[start, end) of the flattened parameter that a dp coord holds: rows by the rule of torch.chunk."""
        shape = self.spec.parameters[name].shape
        rows, row = shape[0], torch.Size(shape[1:]).numel()
        longest = -(-rows // self.mesh.dp.size)
        return min(coord * longest, rows) * row, min((coord + 1) * longest, rows) * row

    def _piece(self, name: str, coord: int) -> Piece | None:
        start, end = self._range(name, coord)
        master = self.master_of.get(name) if coord == self.mesh.dp.coord else None
        return Piece(master, 0, start, end - start) if end > start else None

    def _gathered(self, name: str, own: Tensor) -> Tensor | None:
        pieces = [self._piece(name, coord) for coord in range(self.mesh.dp.size)]
        flat = gather_pieces(pieces, own.to(self.spec.dtype), self.mesh, dtype=self.spec.dtype)
        return flat.view(self.spec.parameters[name].shape) if self.mesh.dp.coord == 0 else None


class _Gradients:
    """This rank's shards of reduced gradients, flat, by name.

    found: parameters to which autograd gave a gradient on this rank. is_new: since ranks last agreed on all found."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.found: set[str] = set()
        self.is_new = False

    def add(self, name: str, gradient: Tensor) -> None:
        """From the second on, low precision adds up in float32."""
        before = self.sums.get(name)
        if before is not None:
            gradient = before.to(torch.promote_types(before.dtype, torch.float32)).add_(gradient)
        self.sums[name], self.is_new = gradient, True

    def clear(self) -> None:
        self.sums.clear()
        self.found.clear()
        self.is_new = False


class _Kept:
    """Gradients of one call, aside from the totals until its loss is given to backward."""

    def __init__(self, totals: _Gradients):
        self.totals, self.gradients = totals, _Gradients()
        self.is_released = False

    def release(self, scale: Tensor) -> None:
        """Add them, times `scale` (0-d), to the totals. Raises ShardcError the second time."""
        if self.is_released:
            raise used_up()
        for name, gradient in self.gradients.sums.items():
            self.totals.add(name, gradient.mul_(scale.to(gradient.dtype)))
        self.totals.found |= self.gradients.found
        self.gradients.clear()
        self.is_released = True


def _places(stage: nn.Module, spec: PlanSpec) -> dict[str, list[tuple[nn.Module, str]]]:
    """The (module, attribute) of each parameter by canonical name; a tied one has several."""
    known = spec.by_any_name()
    places = defaultdict(list)
    for name, _ in stage.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        places[known[name].name].append((stage.get_submodule(path), leaf))
    return dict(places)


def _assign(parameter: nn.Parameter, places: Sequence[tuple[nn.Module, str]]) -> None:
    for owner, leaf in places:
        owner.register_parameter(leaf, parameter)


def _separate_blocks(stage: nn.Module, places: Mapping[str, Sequence[tuple[nn.Module, str]]]) -> list[nn.Module]:
    """Blocks that share no parameter with anything outside: others belong to the stage."""
    found = []
    for block in blocks_of(stage).values():
        inside = set(block.modules())
        counts = [sum(owner in inside for owner, _ in readers) for readers in places.values()]
        touched = [(count, len(readers)) for count, readers in zip(counts, places.values(), strict=True) if count]
        if touched and all(count == readers for count, readers in touched):
            found.append(block)
    return found


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its memory."""
    with torch.no_grad():
        return tensor.to_local()


def _with_gradients(tree: Any) -> list[Tensor]:
    """The tensors in an argument or a result that backward will go through."""
    if not torch.is_grad_enabled():
        return []
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]
