"""Sharded parameters, of which each process holds a part, as FSDP2 makes them (`DTensor`).

Each process updates its own coordinates. Numbers of a whole tensor are sums over the processes that share it.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a `DTensor`."""
    loaded = sys.modules.get("torch.distributed.tensor")  # slow to import, and imported if there is a `DTensor`
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def holds_shards(module: nn.Module) -> bool:
    """Return whether FSDP2 manages a module, so that its forward pass gathers parameters from other processes."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    return loaded is not None and isinstance(module, loaded.FSDPModule)


def local_of(tensor: Any) -> Tensor:
    """Return the part of a tensor that this process holds, in the same memory."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def like(parameter: Any, part: Tensor) -> Tensor:
    """Return a local part as a tensor that is sharded like the parameter, in the same memory."""
    if not is_sharded(parameter):
        return part
    from torch.distributed.tensor import DTensor

    shape = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(part, parameter.device_mesh, parameter.placements, run_check=False, **shape)


def check_sharding(parameter: Any) -> None:
    """Raise TypeError unless a parameter is sharded along its first axis by one axis of the mesh, as by FSDP2."""
    cuts = [placement for placement in parameter.placements if not placement.is_replicate()]
    if len(cuts) > 1 or not all(cut.is_shard(0) for cut in cuts):
        raise TypeError(
            f"a parameter is distributed as {parameter.placements}; VSGD takes parameters that are sharded along their "
            "first axis by one axis of the device mesh, as fully_shard does it"
        )


class Shards(NamedTuple):
    """The parts of the segments of a block in all processes."""

    group: Any
    lengths: tuple[int, ...]
    """Coordinates of each segment in all processes together."""
    offsets: tuple[int, ...]
    """Index of the first coordinate of this process within each segment."""

    def add_up(self, values: Tensor) -> Tensor:
        """Return the sum over the processes."""
        total = values.clone()
        dist.all_reduce(total, group=self.group)
        return total


def summed(sums: Tensor, shards: Shards | None) -> Tensor:
    """Return sums over coordinates, added up over the processes that share a tensor."""
    return sums if shards is None else shards.add_up(sums)


def key_of(parameter: Any) -> Any:
    """Return a key that is equal for parameters that may share buffers."""
    return (parameter.device_mesh, parameter.placements) if is_sharded(parameter) else None


def shards_of(parameters: list[Tensor]) -> Shards | None:
    """Return the shards of parameters with the same key; None if each process holds all of them."""
    first: Any = parameters[0]
    if not is_sharded(first):
        return None
    axis = next((k for k, placement in enumerate(first.placements) if placement.is_shard()), None)
    if axis is None or first.device_mesh.size(axis) == 1:
        return None
    parts, part = first.device_mesh.size(axis), first.device_mesh.get_local_rank(axis)
    # parts are those of `torch.chunk`: all as large as the first, but for the last ones
    rows = [min(part * -(-len(p) // parts), len(p)) for p in parameters]
    offsets = tuple(row * (p.numel() // len(p)) for row, p in zip(rows, parameters, strict=True))
    return Shards(first.device_mesh.get_group(axis), tuple(p.numel() for p in parameters), offsets)
