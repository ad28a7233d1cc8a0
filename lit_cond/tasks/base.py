"""The base of all tasks: one optimizer set-up, configured by flat arguments."""

import math
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler

from lit_cond.checkpoint import restore_corrections
from lit_cond.errors import ConfigurationError
from lit_cond.tasks.optim import split_by_decay, warmup_cosine
from lit_cond.tasks.resume import goes_on, refuse_lost_tokens, warn_of_lost_weights

__all__ = ["Task"]


class Task(LightningModule):
    """AdamW with a linear warm-up and a cosine decay, stepped at every optimizer step.

    Nothing is hard-wired: LightningCLI's ``--optimizer`` and ``--lr_scheduler`` replace what is set up here,
    and so does a subclass that overrides `configure_optimizers`.

    Args:
        lr: Peak learning rate.
        weight_decay: Decay of the parameters that `lit_cond.tasks.optim.split_by_decay` does not spare.
        betas: The two momenta of AdamW.
        warmup_epochs: Length of the linear warm-up in epochs; fractions are allowed.
        warmup_steps: Length of the warm-up in optimizer steps, instead of epochs.
        min_lr: Learning rate at the end of the cosine.

    Raises:
        ConfigurationError: A value is out of range, or both warm-up lengths are given.
    """

    def __init__(
        self,
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        betas: tuple[float, float] = (0.9, 0.999),
        warmup_epochs: float = 0.0,
        warmup_steps: int | None = None,
        min_lr: float = 0.0,
    ) -> None:
        super().__init__()
        if not lr > 0:
            raise ConfigurationError(f"lr is {lr}: give a learning rate above 0")
        if not 0 <= min_lr <= lr:
            raise ConfigurationError(f"min_lr is {min_lr}: give a value from 0 to lr, which is {lr}")
        if weight_decay < 0:
            raise ConfigurationError(f"weight_decay is {weight_decay}: give 0 or more")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigurationError(f"betas is {betas}: give two values, each at least 0 and below 1")
        if warmup_epochs < 0 or (warmup_steps is not None and warmup_steps < 0):
            raise ConfigurationError(
                f"warmup_epochs is {warmup_epochs} and warmup_steps {warmup_steps}: a length is 0 or more"
            )
        if warmup_epochs and warmup_steps is not None:
            raise ConfigurationError(
                f"warmup_epochs is {warmup_epochs} and warmup_steps {warmup_steps}: give only one of them"
            )
        self.lr = lr
        self.weight_decay = weight_decay
        self.betas = betas
        self.warmup_epochs = warmup_epochs
        self.warmup_steps = warmup_steps
        self.min_lr = min_lr

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over the corrections that the checkpoint records, before its weights are loaded.

        A `fit` takes them from its callbacks.

        Raises:
            CheckpointMismatchError: A `fit` would go on without a correction of tokens.
        """
        if goes_on(self):
            refuse_lost_tokens(self, checkpoint)
            warn_of_lost_weights(self, checkpoint)
        else:
            restore_corrections(self, checkpoint)

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Group the trainable parameters for any optimizer of torch.

        Args:
            weight_decay: Decay of the first group; that of the second is 0.

        Returns:
            Groups named ``decay`` and ``no_decay`` that hold every trainable parameter once; an empty one is
            left out.
        """
        decay, no_decay = split_by_decay(self)
        groups: list[dict[str, Any]] = [
            {"name": "decay", "params": decay, "weight_decay": weight_decay},
            {"name": "no_decay", "params": no_decay, "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build AdamW and its schedule for the run the trainer is about to start.

        Raises:
            ConfigurationError: The run has no end known in advance, so the cosine can not be laid out.
        """
        total_steps = self.trainer.estimated_stepping_batches
        if math.isinf(total_steps):
            raise ConfigurationError(
                "max_epochs and max_steps of the trainer are both -1: set one, the schedule needs an end"
            )
        optimizer = torch.optim.AdamW(self.parameter_groups(self.weight_decay), lr=self.lr, betas=self.betas)
        factor = partial(
            warmup_cosine,
            warmup_steps=self._warmup_length(),
            total_steps=int(total_steps),
            floor=self.min_lr / self.lr,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "name": "lr"},
        }

    def _warmup_length(self) -> int:
        if self.warmup_steps is not None:
            return self.warmup_steps
        if not self.warmup_epochs:
            return 0
        self.trainer.fit_loop.setup_data()  # a run limited by steps alone has not loaded its data yet
        batches = self.trainer.num_training_batches
        if math.isinf(batches):
            raise ConfigurationError(
                f"warmup_epochs is {self.warmup_epochs} and the training data has no length: give warmup_steps"
            )
        return round(self.warmup_epochs * math.ceil(batches / self.trainer.accumulate_grad_batches))
