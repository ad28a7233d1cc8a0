"""Image classification with a backbone from timm, torchvision, transformers or Python."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from lit_cond.errors import ConfigurationError
from lit_cond.extras import optional_imports
from lit_cond.tasks.backbones import build_backbone, logits_of
from lit_cond.tasks.base import Task
from lit_cond.tasks.metrics import classification_metrics, confusion_figure

__all__ = ["ImageClassification"]


class ImageClassification(Task):
    """Cross-entropy training of an image classifier, with mixup, cutmix and label smoothing.

    A batch is a pair of images, shape (batch, channels, height, width), and labels, shape (batch,).

    Logged are ``train/loss``, ``train/acc`` (against the larger share of a mixed label), and for each of
    ``val`` and ``test``: ``loss`` (cross-entropy, not smoothed), ``acc`` (top-1), ``acc_top5`` (with at least
    six classes), ``calibration_error`` (expected, 15 bins), and ``confusion``, the confusion matrix as a
    figure in every logger that takes figures.

    The arguments are kept in the checkpoint, so `load_from_checkpoint` needs nothing but the path; only a
    backbone given as a module has to be passed again.

    Args:
        num_classes: Number of classes. Data modules offer it as ``num_classes``; the command line links it.
        backbone: A name such as ``timm/vit_base_patch16_224`` (see `lit_cond.tasks.build_backbone`), or a
            module that returns logits.
        backbone_args: Arguments for the constructor of a backbone given by name.
        pretrained: Whether to load trained weights; None means what the name suggests.
        label_smoothing: Share of the target spread evenly over all classes in training.
        mixup_alpha: Parameter of the Beta distribution of mixup; 0 turns it off.
        cutmix_alpha: The same for cutmix. With both on, each batch takes one of them with equal chance.
        confusion_matrix: Whether to draw the confusion matrix.
        lr: Peak learning rate.
        weight_decay: Decay of weights; norms, biases, positions and extra tokens have none.
        betas: The two momenta of AdamW.
        warmup_epochs: Length of the linear warm-up in epochs; fractions are allowed.
        warmup_steps: Length of the warm-up in optimizer steps, instead of epochs.
        min_lr: Learning rate at the end of the cosine.

    Raises:
        ConfigurationError: A value is out of range or the backbone is unknown.
        MissingExtraError: The library of the backbone is not installed.

    Example:
        >>> task = ImageClassification(10, "timm/vit_tiny_patch16_224", {"img_size": 32, "depth": 1})
        >>> task(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        num_classes: int,
        backbone: str | nn.Module = "timm/vit_tiny_patch16_224",
        backbone_args: dict[str, Any] | None = None,
        pretrained: bool | None = None,
        label_smoothing: float = 0.0,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        confusion_matrix: bool = True,
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        betas: tuple[float, float] = (0.9, 0.999),
        warmup_epochs: float = 0.0,
        warmup_steps: int | None = None,
        min_lr: float = 0.0,
    ) -> None:
        super().__init__(lr, weight_decay, betas, warmup_epochs, warmup_steps, min_lr)
        if not 0 <= label_smoothing < 1:
            raise ConfigurationError(f"label_smoothing is {label_smoothing}: give at least 0 and less than 1")
        for name, alpha in (("mixup_alpha", mixup_alpha), ("cutmix_alpha", cutmix_alpha)):
            if alpha < 0:
                raise ConfigurationError(f"{name} is {alpha}: give 0 for off, or a positive value")
        # A module is stored with its weights already, and could not be written into a configuration.
        self.save_hyperparameters(ignore=["backbone"] if isinstance(backbone, nn.Module) else [])
        self.num_classes = num_classes
        self.label_smoothing = label_smoothing
        self.backbone = build_backbone(backbone, num_classes, pretrained, **(backbone_args or {}))
        self.mixing = _batch_mixing(num_classes, mixup_alpha, cutmix_alpha)
        self.train_acc = MulticlassAccuracy(num_classes, average="micro")
        self.val_metrics = classification_metrics(num_classes, "val/")
        self.test_metrics = self.val_metrics.clone(prefix="test/")
        self.val_confusion = MulticlassConfusionMatrix(num_classes) if confusion_matrix else None
        self.test_confusion = MulticlassConfusionMatrix(num_classes) if confusion_matrix else None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Classify images.

        Args:
            images: Shape (batch, channels, height, width).

        Returns:
            Logits, shape (batch, num_classes).
        """
        return logits_of(self.backbone(images), self.num_classes)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch, mixed if so configured."""
        images, targets = batch
        if self.mixing is not None:
            images, targets = self.mixing(images, targets)
        logits = self(images)
        loss = F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        labels = targets.argmax(dim=1) if targets.ndim == 2 else targets
        self.train_acc.update(logits, labels)
        size = len(images)
        self.log("train/loss", loss, prog_bar=True, batch_size=size)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True, batch_size=size)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        """Update the metrics of the validation set."""
        self._evaluate(batch, "val", self.val_metrics, self.val_confusion)

    def test_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        """Update the metrics of the test set."""
        self._evaluate(batch, "test", self.test_metrics, self.test_confusion)

    def predict_step(
        self, batch: torch.Tensor | tuple[torch.Tensor, ...] | list[torch.Tensor], batch_idx: int
    ) -> dict[str, torch.Tensor]:
        """Classify a batch of images, with or without labels.

        Returns:
            ``logits``, shape (batch, num_classes), and the predicted ``labels``, shape (batch,).
        """
        images = batch if isinstance(batch, torch.Tensor) else batch[0]
        logits = self(images)
        return {"logits": logits, "labels": logits.argmax(dim=1)}

    def on_validation_epoch_end(self) -> None:
        """Draw the confusion matrix of the validation set."""
        self._draw_confusion("val", self.val_confusion)

    def on_test_epoch_end(self) -> None:
        """Draw the confusion matrix of the test set."""
        self._draw_confusion("test", self.test_confusion)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record that the weights are in this checkpoint: loading it must not fetch the trained ones."""
        arguments = checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY)
        if arguments is not None and arguments.get("pretrained") is not False:
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = {**arguments, "pretrained": False}

    def _evaluate(
        self,
        batch: tuple[torch.Tensor, torch.Tensor],
        stage: str,
        metrics: MetricCollection,
        confusion: MulticlassConfusionMatrix | None,
    ) -> None:
        images, labels = batch
        logits = self(images)
        size = len(images)
        metrics.update(logits, labels)
        if confusion is not None:
            confusion.update(logits, labels)
        self.log(f"{stage}/loss", F.cross_entropy(logits, labels), batch_size=size, sync_dist=True)
        for name, metric in metrics.items():
            self.log(name, metric, prog_bar=name == "val/acc", batch_size=size)

    def _draw_confusion(self, stage: str, confusion: MulticlassConfusionMatrix | None) -> None:
        if confusion is None:
            return
        counts = confusion.compute()  # on every rank: it is a collective call
        # A state made in inference mode, where trainer.validate is, could not be updated in a later fit.
        with torch.inference_mode(False):
            confusion.reset()
        if self.trainer.sanity_checking or not self.trainer.is_global_zero:
            return
        for logger in self.trainer.loggers:
            add_figure = getattr(getattr(logger, "experiment", None), "add_figure", None)
            if add_figure is not None:
                add_figure(f"{stage}/confusion", confusion_figure(counts), self.global_step)


def _batch_mixing(num_classes: int, mixup_alpha: float, cutmix_alpha: float) -> nn.Module | None:
    if not mixup_alpha and not cutmix_alpha:
        return None
    with optional_imports("the mixing of images"):
        from torchvision.transforms import v2

    mixers = []
    # Each holds a distribution on the CPU, also where the model is built on another device or on none (meta).
    with torch.device("cpu"):
        if mixup_alpha:
            mixers.append(v2.MixUp(alpha=mixup_alpha, num_classes=num_classes))
        if cutmix_alpha:
            mixers.append(v2.CutMix(alpha=cutmix_alpha, num_classes=num_classes))
    mixing: nn.Module = mixers[0] if len(mixers) == 1 else v2.RandomChoice(mixers)
    return mixing
