"""The pictures of the monitor: which to draw, and how rarely."""

import time
from collections.abc import Mapping

from lightning.pytorch import Trainer
from torch import Tensor

from lit_cond.callbacks.charts import HeatMap, log_figure, log_histogram, log_layout, log_spectra

__all__ = ["OVER_LAYERS", "MonitorCharts"]

OVER_LAYERS = ("mean", "max", "min", "nonfinite")
"""Endings of keys that say something of all layers."""

# A figure takes 0.1 to 0.2 s: this share of a training's time may go into drawing. The last ones are drawn at its end.
_SHARE = 0.01


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
        # Figures of spectra that were not drawn yet: step, and singular values by layer.
        self._spectra: dict[str, tuple[int, dict[str, Tensor]]] = {}
        self._began = time.perf_counter()
        self._spent = 0.0
        self._first = True

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
        if self._first:
            log_layout(trainer, values)
            self._first = False
        if self.histogram:
            for quantity, layers in spectra.items():
                log_histogram(trainer, f"spectrum/{quantity}", [s for found in layers.values() for s in found], step)
                if full:
                    names = list(layers)
                    chosen = dict.fromkeys((names[0], names[len(names) // 2], names[-1]))
                    self._spectra[quantity] = (step, {name: layers[name][0] for name in chosen})
        if self.heatmap:
            for key, value in values.items():
                statistic, quantity, *rest = key.split("/")
                if statistic == "cond" and len(rest) == 1 and rest[0] not in OVER_LAYERS:
                    self._maps.setdefault(quantity, HeatMap(quantity)).add(rest[0], step, value)
        if self._spent <= _SHARE * (time.perf_counter() - self._began) - 1.0:
            self.finish(trainer)

    def finish(self, trainer: Trainer) -> None:
        """Log the figures as they are now."""
        start = time.perf_counter()
        for quantity, heat_map in self._maps.items():
            if heat_map.columns > 1:
                log_figure(trainer, f"heatmap/{quantity}", heat_map, trainer.global_step)
        for quantity, (step, layers) in self._spectra.items():
            log_spectra(trainer, quantity, layers, step)
        self._spectra = {}
        self._spent += time.perf_counter() - start
