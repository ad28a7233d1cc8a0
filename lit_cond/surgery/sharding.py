"""Parameters that FSDP's first version holds as flat shards: seen whole for a while, and their shards in a checkpoint.

The shards of `fully_shard` and of tensor parallelism are `DTensor`s, which know their place in the whole, so that
`weights.gathered` and `weights.laid_out_like` do. A parameter under `FullyShardedDataParallel` is a piece of a flat
vector outside of the forward pass, or empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

__all__ = ["ShardedValue", "is_flat_sharded", "is_shard", "is_unit", "local_parts", "whole_parameters"]


def is_flat_sharded(model: nn.Module) -> bool:
    """Say whether a part of the model is wrapped in `FullyShardedDataParallel`."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def is_unit(module: nn.Module) -> bool:
    """Say whether `fully_shard` was called on this very module, so that its weights are whole in its forward only."""
    return isinstance(module, FSDPModule)


@contextmanager
def whole_parameters(model: nn.Module | None, *, writeback: bool = False) -> Iterator[None]:
    """Let the parameters below `FullyShardedDataParallel` be whole; without such a module nothing is done.

    Every process must enter it, and none within a forward pass.

    Args:
        model: The outermost wrapper: a module inside of it does not know that its parameters are sharded.
        writeback: Whether changes go back into the shards.
    """
    if model is None or not is_flat_sharded(model):
        yield
        return
    with FullyShardedDataParallel.summon_full_params(model, writeback=writeback):
        yield


class ShardedValue(Protocol):
    """What torch calls a `ShardedTensor`: the entry of a sharded state dict of `FullyShardedDataParallel`."""

    def local_shards(self) -> Sequence[Any]:
        """Return the pieces that this process holds, each with `tensor` and `metadata`."""
        ...


def is_shard(value: Tensor) -> bool:
    """Say whether an entry of a state dict is this process's part of a whole."""
    return isinstance(value, DTensor) or hasattr(value, "local_shards")


def local_parts(value: ShardedValue) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """Yield the pieces of a sharded value that this process holds, and where in the whole they belong."""
    for shard in value.local_shards():
        metadata = shard.metadata
        place = tuple(
            slice(start, start + size) for start, size in zip(metadata.shard_offsets, metadata.shard_sizes, strict=True)
        )
        yield torch.as_tensor(shard.tensor), place
