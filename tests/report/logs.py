"""Logs as a monitor writes them, without a training."""

import math

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

LAYERS = [f"net.blocks.{i}.attn" for i in (0, 1, 2, 10)]


def scalars(step, factor=1.0, corrected=True):
    """Return what is logged at a step: all statistics of the log keys."""
    found = {}
    for quantity in ("query", "tokens", "scores", "jacobian"):
        rows = {layer: factor * (2.0 + i + step / 10) for i, layer in enumerate(LAYERS)}
        for prefix, scale in (("cond", 1.0), ("cond_raw", 100.0)):
            if prefix == "cond" or (corrected and quantity in ("query", "tokens")):
                found |= {f"{prefix}/{quantity}/{layer}": value * scale for layer, value in rows.items()}
                found[f"{prefix}/{quantity}/mean"] = sum(rows.values()) / len(rows) * scale
                found[f"{prefix}/{quantity}/max"] = max(rows.values()) * scale
    for i, layer in enumerate(LAYERS):
        found[f"entropy/scores/{layer}"] = 1.0 + i / 10
        found[f"entropy_share/scores/{layer}"] = 0.5 + i / 10
        found[f"saturated/scores/{layer}"] = 0.1 * i
        found[f"stable_rank/query/{layer}"] = 3.0 + i
    found |= {"entropy/scores/mean": 1.2, "entropy/scores/min": 1.0, "entropy_share/scores/mean": 0.6}
    found |= {"saturated/scores/mean": 0.15, "saturated/scores/max": 0.3, "stable_rank/query/min": 3.0}
    found |= {"sigma_max/query/max": 9.0, "sigma_min/query/min": 0.1}
    found |= {"bound/tokens/max": 30.0, "bound/softmax_derivative/max": 1e6}
    return found


def write_events(folder, steps=range(0, 50, 10), factor=1.0, corrected=True, extra=None, suffix=""):
    """Write an event file with everything in it; return its path."""
    before = set(folder.glob("*tfevents*")) if folder.exists() else set()
    writer = SummaryWriter(str(folder), filename_suffix=suffix)
    for step in steps:
        for key, value in scalars(step, factor, corrected).items():
            writer.add_scalar(key, value, step)
        writer.add_histogram("spectrum/query", torch.logspace(-3, 0, 32).log10() * factor, step)
        writer.add_scalar("val/acc", 0.5 + step / 1000, step)
        writer.add_scalar("train/loss", 2.0 - step / 100, step)
        for key, value in (extra or {}).items():
            writer.add_scalar(key, value, step)
    writer.add_scalar("test/acc", 0.9, max(steps))
    writer.add_image("spectra/query", np.zeros((3, 40, 60), dtype=np.uint8), max(steps))
    writer.add_text("conditioning", "```\na   b\n```", 0)
    writer.close()
    (file,) = set(folder.glob("*tfevents*")) - before
    return file


def write_csv(folder, steps=range(0, 50, 10), columns=None):
    """Write a metrics.csv like Lightning's: sorted columns, validation in rows of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted({*scalars(0), "val/acc", "step", "epoch"}) if columns is None else columns
    lines = [",".join(names)]
    for step in steps:
        for values in (scalars(step), {"val/acc": 0.5 + step / 1000, "epoch": 0}):
            values = {**values, "step": step}
            lines.append(",".join("" if math.isnan(v := values.get(name, math.nan)) else str(v) for name in names))
    file = folder / "metrics.csv"
    file.write_text("\n".join(lines) + "\n")
    return file
