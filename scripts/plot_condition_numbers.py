"""Draw the condition numbers and a metric of one or more runs from their TensorBoard event files.

Example:
    python scripts/plot_condition_numbers.py conditioned=runs/a plain=runs/b --metric val/acc --out plot.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from lit_cond.errors import DataError, LitCondError
from lit_cond.extras import optional_imports

with optional_imports("the plot of condition numbers"):
    from matplotlib.figure import Figure
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PANELS = {"query": "query weights", "key": "key weights", "value": "value weights", "tokens": "tokens"}


def read_scalars(folder: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Return every scalar series of a run, steps and values, from all event files below its folder.

    Args:
        folder: A run's folder.

    Raises:
        DataError: If there is no event file.
    """
    files = sorted(folder.rglob("events.out.tfevents.*"))
    if not files:
        raise DataError(f"no event file below '{folder}'; give the folder of a run that logged to TensorBoard")
    series: dict[str, dict[int, float]] = {}
    for parent in dict.fromkeys(file.parent for file in files):
        events = EventAccumulator(str(parent), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            series.setdefault(tag, {}).update({event.step: event.value for event in events.Scalars(tag)})
    return {tag: (sorted(points), [points[step] for step in sorted(points)]) for tag, points in series.items()}


def draw(runs: dict[str, dict[str, tuple[list[int], list[float]]]], metric: str) -> Any:
    """Return a figure with one panel for each quantity and one for the metric, all runs in each.

    Args:
        runs: Scalar series of each run by its label.
        metric: Tag of the last panel.
    """
    figure = Figure(figsize=(14, 3.2), layout="constrained")
    panels = figure.subplots(1, len(PANELS) + 1)
    for axes, (quantity, title) in zip(panels, PANELS.items(), strict=False):
        for index, (label, series) in enumerate(runs.items()):
            color = f"C{index}"
            if f"cond/{quantity}/mean" in series:
                axes.plot(*series[f"cond/{quantity}/mean"], color=color, label=label)
            if f"cond_raw/{quantity}/mean" in series:
                raw = series[f"cond_raw/{quantity}/mean"]
                axes.plot(*raw, color=color, linestyle=":", label=f"{label}, without its correction")
        axes.set_yscale("log")
        axes.set_title(f"condition number: {title}", fontsize=9)
    for index, (label, series) in enumerate(runs.items()):
        if metric in series:
            panels[-1].plot(*series[metric], color=f"C{index}", label=label)
    panels[-1].set_title(metric, fontsize=9)
    for axes in panels:
        axes.set_xlabel("optimizer step", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    return figure


def main(arguments: list[str] | None = None) -> int:
    """Run the script; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="LABEL=FOLDER", help="runs to draw, in the order of their colours")
    parser.add_argument("--metric", default="val/acc", help="tag of the last panel (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="the PNG file to write")
    options = parser.parse_args(arguments)
    try:
        labelled = dict(run.split("=", 1) if "=" in run else (Path(run).name, run) for run in options.runs)
        figure = draw({label: read_scalars(Path(folder)) for label, folder in labelled.items()}, options.metric)
    except LitCondError as error:
        print(f"plot_condition_numbers: error: {error}", file=sys.stderr)
        return 2
    figure.savefig(options.out, dpi=110)
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
