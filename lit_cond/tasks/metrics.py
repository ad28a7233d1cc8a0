"""The metrics of a classifier and the picture of its confusion matrix."""

from typing import TYPE_CHECKING

import torch
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError

from lit_cond.extras import optional_imports

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["classification_metrics", "confusion_figure"]

_MOST_CLASSES_WITH_NUMBERS = 20


def classification_metrics(num_classes: int, prefix: str) -> MetricCollection:
    """Build the metrics of one evaluation stage.

    Args:
        num_classes: Number of classes.
        prefix: Put before each name, such as ``val/``.

    Returns:
        ``acc`` (share of samples whose label is the top prediction), ``acc_top5`` (among the five best; only
        with at least six classes) and ``calibration_error`` (expected calibration error over 15 bins).
    """
    metrics: dict[str, Metric | MetricCollection] = {
        "acc": MulticlassAccuracy(num_classes, average="micro"),
        "calibration_error": MulticlassCalibrationError(num_classes, n_bins=15),
    }
    if num_classes > 5:
        metrics["acc_top5"] = MulticlassAccuracy(num_classes, top_k=5, average="micro")
    # Groups are formed from the states after the first batch, where top-1 and top-5 may happen to agree.
    return MetricCollection(metrics, prefix=prefix, compute_groups=False)


def confusion_figure(counts: torch.Tensor) -> "Figure":
    """Draw a confusion matrix.

    Args:
        counts: Samples by true class (row) and predicted class (column), shape (classes, classes).

    Returns:
        A figure whose colours are shares of each row. Up to 20 classes have their counts written into the
        cells, more have a colour bar.
    """
    with optional_imports("the confusion matrix"):
        from matplotlib.figure import Figure

    counts = counts.cpu()
    shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    figure = Figure(figsize=(5, 5), dpi=80)
    axes = figure.add_subplot(xlabel="predicted class", ylabel="true class")
    picture = axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    # Drawn after every validation, so it is kept simple: a bar and an automatic layout double the time.
    if len(counts) > _MOST_CLASSES_WITH_NUMBERS:
        figure.colorbar(picture, label="share of the true class")
    else:
        axes.set_xticks(range(len(counts)))
        axes.set_yticks(range(len(counts)))
        for row, column in counts.nonzero().tolist():
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(int(counts[row, column])), ha="center", va="center", color=colour, fontsize=8)
    return figure
