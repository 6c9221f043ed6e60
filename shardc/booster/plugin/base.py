"""What all plugins have: checked arguments, a recipe, the sizes of the mesh, a dataloader."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardc.booster.data import ShardedLoader, shard_dataloader
from shardc.booster.epoch_sampler import EpochSampler
from shardc.booster.plugin.arguments import arguments_text, check, warning_text, without_effect
from shardc.booster.plugin.recipe import PRECISIONS, Recipe
from shardc.errors import ShardcError


class Plugin:
    """A plugin is its arguments, a table in each subclass, and the Recipe that they ask for.

    A subclass is a frozen dataclass whose fields are the constructor's arguments, made by `argument`, and defines
    `_recipe`. Arguments without effect are listed in one warning, on the first rank. Raises ShardcError, when it is
    made, for a wrong value, and for sizes that do not divide the job where torch.distributed has started.
    """

    recipe: Recipe

    def __post_init__(self) -> None:
        check(self)
        # The arguments say what the recipe is, so none of them may change after it was made.
        object.__setattr__(self, "recipe", self._recipe())
        if dist.is_initialized():
            self.dp_size  # noqa: B018  raises where the sizes do not divide the job
        reasons = without_effect(self) | self._without_effect()
        if reasons and _rank() == 0:
            warnings.warn(warning_text(self, reasons), stacklevel=4)

    def _recipe(self) -> Recipe:
        raise NotImplementedError

    def _without_effect(self) -> dict[str, str]:
        """Arguments that have no effect beside the values of others: name to reason."""
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({arguments_text(self)})"

    @property
    def tp_size(self) -> int:
        """Size of the tensor parallel axis."""
        return self.recipe.tp

    @property
    def pp_size(self) -> int:
        """Number of pipeline stages that ranks share."""
        return self.recipe.pp

    @property
    def dp_size(self) -> int:
        """Number of model replicas. Raises ShardcError where tp * pp does not divide the job."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        model = self.recipe.tp * self.recipe.pp
        if world % model:
            raise ShardcError(
                f"{type(self).__name__}: tp_size={self.recipe.tp} * pp_size={self.recipe.pp} = {model} does not divide "
                f"the {world} process(es) of this job",
                f"start a multiple of {model} processes (shardc run --nproc_per_node {model}), after "
                "shardc.launch_from_torch()",
            )
        return world // model

    @property
    def dp_coord(self) -> int:
        """Which replica this rank belongs to: rank = (dp coord * pp + pp coord) * tp + tp coord."""
        return _rank() // (self.recipe.tp * self.recipe.pp)

    @property
    def precision(self) -> str | None:
        """ "fp16", "bf16", "fp32", or None where Booster or the model says."""
        return self.recipe.precision

    def support_no_sync(self) -> bool:
        """Whether gradients may stay unreduced between calls: they are whole on each rank."""
        return self.recipe.placement in ("ddp", "zero1")

    def support_lora(self) -> bool:
        """Whether Booster.enable_lora may add adapters to the model."""
        return True

    def supported_precisions(self) -> list[str]:
        """What `precision` may be."""
        return list(PRECISIONS)

    def supported_devices(self) -> list[str]:
        """Types of the devices that it trains on."""
        return ["cuda", "cpu"]

    def control_precision(self) -> bool:
        """Whether the plugin's precision comes before Booster's mixed_precision."""
        return self.recipe.precision is not None

    def control_device(self) -> bool:
        """Whether the plugin chooses the device: the rank's own GPU, or the CPU where there is none."""
        return True

    def prepare_dataloader(
        self,
        dataset: Dataset,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> ShardedLoader:
        """The loader of this rank's batches, as boost makes it of a DataLoader; boost keeps it, with its length.

        batch_size: rows of each dp rank. seed: of the order, another one each epoch; `loader.sampler.set_epoch` sets
        the number of the next. distributed_sampler_cls: makes the sampler instead, from (dataset, num_replicas=,
        rank=, shuffle=, and seed=, drop_last= where it takes them). kwargs: those of DataLoader.
        Raises ShardcError for what DataLoader refuses."""
        size, coord = self.dp_size, self.dp_coord
        settings = {"drop_last": drop_last, "pin_memory": pin_memory, "num_workers": num_workers, **kwargs}
        try:
            if distributed_sampler_cls is not None:
                wanted = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
                sampler = _call(distributed_sampler_cls, dataset, num_replicas=size, rank=coord, **wanted)
            elif isinstance(dataset, IterableDataset):
                if shuffle:
                    raise ValueError("an IterableDataset has an order of its own, shuffle=True cannot change it")
                sampler = None
            else:
                sampler = EpochSampler(dataset, shuffle=shuffle, generator=kwargs.get("generator"))
            loader = DataLoader(dataset, batch_size, sampler=sampler, **settings)
        except (TypeError, ValueError) as error:
            raise ShardcError(
                f"{type(self).__name__}.prepare_dataloader: {error}", "its arguments are those of DataLoader"
            ) from error
        return shard_dataloader(loader, coord=coord, size=size, seed=seed, seeded=True)


def _call(function: Callable[..., Any], dataset: Dataset, **arguments: Any) -> Any:
    """function(dataset, ...) with those of the arguments that it takes."""
    taken = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return function(dataset, **arguments)
    return function(dataset, **{name: value for name, value in arguments.items() if name in taken})


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
