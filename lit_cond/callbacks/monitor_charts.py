"""The pictures of the monitor: which to draw, and how rarely."""

from collections.abc import Mapping

from lightning.pytorch import Trainer
from torch import Tensor

from lit_cond.callbacks.charts import HeatMap, log_figure, log_histogram, log_layout, log_spectra

__all__ = ["OVER_LAYERS", "MonitorCharts"]

OVER_LAYERS = ("mean", "max", "min", "nonfinite")
"""Endings of keys that say something of all layers."""


class MonitorCharts:
    """Draws what was measured, step by step.

    Args:
        histogram: Whether to log histograms and figures of singular values.
        heatmap: Whether to log heat maps.
    """

    def __init__(self, histogram: bool, heatmap: bool) -> None:
        self.histogram = histogram
        self.heatmap = heatmap
        self._maps: dict[str, HeatMap] = {}
        self._count = 0

    def draw(
        self,
        trainer: Trainer,
        step: int,
        spectra: Mapping[str, Mapping[str, list[Tensor]]],
        values: Mapping[str, float],
        *,
        full: bool,
    ) -> None:
        """Log the pictures of one measured step.

        Args:
            trainer: Its loggers that take pictures are used.
            step: The optimizer step.
            spectra: Singular values of matrices, by quantity and layer.
            values: All numbers by key.
            full: Whether spectra of weights are among them.
        """
        self._count += 1
        if self._count == 1:
            log_layout(trainer, values)
        # A figure takes 0.1 s: draw the first ones and then ever more rarely; the last is drawn when training ends.
        rarely = self._count & (self._count - 1) == 0
        if self.histogram:
            for quantity, layers in spectra.items():
                log_histogram(trainer, f"spectrum/{quantity}", [s for found in layers.values() for s in found], step)
                if full and rarely:
                    names = list(layers)
                    chosen = dict.fromkeys((names[0], names[len(names) // 2], names[-1]))
                    log_spectra(trainer, quantity, {name: layers[name][0] for name in chosen}, step)
        if self.heatmap:
            for key, value in values.items():
                statistic, quantity, *rest = key.split("/")
                if statistic == "cond" and len(rest) == 1 and rest[0] not in OVER_LAYERS:
                    self._maps.setdefault(quantity, HeatMap(quantity)).add(rest[0], step, value)
            if rarely:
                self.finish(trainer)

    def finish(self, trainer: Trainer) -> None:
        """Log the heat maps as they are now."""
        for quantity, heat_map in self._maps.items():
            log_figure(trainer, f"heatmap/{quantity}", heat_map, trainer.global_step)
