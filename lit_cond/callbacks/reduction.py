"""What several processes have to agree on: numbers of samples, and how many batches there are."""

import math
from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch import Trainer

from lit_cond.errors import ConfigurationError

__all__ = ["await_end_of_epoch", "mean_over_processes", "refuse_unequal_batches"]


def await_end_of_epoch(trainer: Trainer) -> None:
    """Let processes whose loaders have no length end an epoch together.

    One that has more batches than the others waits for them within a step; they wait here. That ends with the error of
    the strategy's `timeout`, where its step would have been joined to one of their next epoch.
    """
    if trainer.world_size > 1 and math.isinf(trainer.num_training_batches):
        trainer.strategy.reduce(torch.zeros(1, device=trainer.strategy.root_device), reduce_op="sum")


def refuse_unequal_batches(trainer: Trainer) -> None:
    """Refuse loaders with other numbers of batches in other processes, which would wait for each other for ever.

    Call it in every process when training starts. Loaders without a length can not be checked.

    Raises:
        ConfigurationError: In every process, if the numbers differ.
    """
    if trainer.world_size == 1:
        return
    own = [float(trainer.num_training_batches), *map(float, trainer.num_val_batches)]
    counts = torch.zeros(trainer.world_size, len(own), device=trainer.strategy.root_device)
    counts[trainer.global_rank] = torch.tensor(own)
    counts = trainer.strategy.reduce(counts, reduce_op="sum")
    for index, column in enumerate(counts.T.tolist()):
        if len(set(column)) > 1:
            kind, option = ("validation", "limit_val_batches") if index else ("training", "limit_train_batches")
            raise ConfigurationError(
                f"the processes have {', '.join(f'{count:g}' for count in column)} {kind} batches and would wait for "
                f"each other for ever; give each the same number, or set {option}={min(column):g}"
            )


def mean_over_processes(trainer: Trainer, values: Mapping[str, float], shared: Sequence[str]) -> dict[str, float]:
    """Return numbers with those of samples averaged over all processes that have a finite one.

    Call it in every process. Without a finite one, a number is inf if any process has inf, NaN if any has that, and
    left out if none has any.

    Args:
        trainer: Its strategy does the sum.
        values: Numbers of this process.
        shared: Keys of the numbers that differ between processes, the same keys in the same order in each.
    """
    if trainer.world_size == 1 or not shared:
        return dict(values)
    columns = []
    for key in shared:
        value = values.get(key)
        finite = value is not None and math.isfinite(value)
        columns.append((value if finite else 0.0, finite, value == math.inf, value is not None and math.isnan(value)))
    device = trainer.strategy.root_device
    local = torch.tensor(columns, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    total = trainer.strategy.reduce(local, reduce_op="sum").tolist()
    result = {key: value for key, value in values.items() if key not in set(shared)}
    for key, (amount, count, infinite, unknown) in zip(shared, total, strict=True):
        if count:
            result[key] = amount / count
        elif infinite or unknown:
            result[key] = math.inf if infinite else math.nan
    return result
