"""Look at the attention of every model that can be built, and list what can not be measured, with the reason.

    python scripts/observation_check.py [--source timm transformers torchvision] [--report docs/observation.md]

Each model is built small with random weights and run on its own sample inputs; every layer that is found is observed
while it runs, and its softmax matrix, output, entropy and Jacobian are measured. What is not a number is listed. An
exception that is not a reason in words is a fault, and the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # the zoo stands beside this script
    sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

from lit_cond.errors import LitCondError  # noqa: E402
from lit_cond.measuring.install import observe_forward  # noqa: E402
from lit_cond.measuring.observe import ObservedAttention, ObservedSample  # noqa: E402
from lit_cond.measuring.quantities import attention_spectra, entropy_numbers, jacobian_spectra, score_spectra  # noqa: E402
from lit_cond.surgery.samples import sampled_parts  # noqa: E402
from lit_cond.surgery.survey import survey_attention  # noqa: E402
from scripts.conformance_oracle.worker import load_source  # noqa: E402

SOURCES = ("timm", "torchvision", "transformers")
QUANTITIES: dict[str, Callable[[ObservedAttention, ObservedSample], object]] = {
    "entropy": lambda observed, sample: entropy_numbers(sample, 128),
    "scores": lambda observed, sample: score_spectra(sample, 128),
    "attention": attention_spectra,
    "jacobian": lambda observed, sample: jacobian_spectra(observed, sample, 64),
}


@dataclass
class Findings:
    """What was found in the models of one source."""

    models: int = 0
    layers: int = 0
    measured: Counter[str] = field(default_factory=Counter)
    reasons: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def note(self, quantity: str, reason: str, model: str) -> None:
        """Count a layer of a model without a number."""
        models = self.reasons.setdefault((quantity, reason), {})
        models[model] = models.get(model, 0) + 1


def observe_model(name: str, model: torch.nn.Module, into: Findings) -> None:
    """Run one model and take down what is measured of each layer, and why not."""
    survey = survey_attention(model)
    missing = {site.name: "no sample input reaches it" for site in survey.sites}

    def note(observed: ObservedAttention) -> None:
        layer = observed.site.name
        if layer not in missing:
            return
        del missing[layer]
        for quantity, measure in QUANTITIES.items():
            for sample in observed.samples[:1]:
                try:
                    measure(observed, sample)
                    into.measured[quantity] += 1
                except LitCondError as error:
                    into.note(quantity, str(error).removeprefix(f"'{layer}': "), name)

    for _, part, samples in sampled_parts(model):
        inside = set(part.modules())
        for sample in [] if isinstance(samples, Exception) else samples:
            left = [site for site in survey.sites if site.name in missing and site.module in inside]
            for layer, error in observe_forward(part, left, sample, note, 2).items():
                if not isinstance(error, LitCondError):
                    into.faults.append(f"{name} {layer}: {type(error).__name__}: {error}")
                elif layer in missing and "did not run" not in str(error):
                    missing[layer] = str(error).partition(") ")[2].replace(layer, "it") or str(error)
    into.models += 1
    into.layers += len(survey.sites)
    for reason in missing.values():
        into.note("all", reason, name)


def check(source: str, every: int) -> Findings:
    """Observe all models of one source, or every so many of them."""
    found = Findings()
    for entry in load_source(source)[::every]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                model = entry.model.build()
            except Exception as error:  # libraries that are not installed, broken default configurations
                found.note("not built", type(error).__name__, entry.model.name)
                continue
            try:
                observe_model(entry.model.name, model, found)
            except Exception as error:  # the sweep goes on, and this is what it looks for
                found.faults.append(f"{entry.model.name}: {type(error).__name__}: {error}")
    return found


def lines_of(source: str, found: Findings) -> list[str]:
    """Return the report of one source in Markdown."""
    measured = ", ".join(f"{name} {found.measured[name]}" for name in QUANTITIES)
    lines = [f"## {source}", "", f"{found.models} models, {found.layers} attention layers; measured: {measured}.", ""]
    if found.faults:
        lines += ["**Faults**", "", *(f"- {fault}" for fault in found.faults), ""]
    if found.reasons:
        lines += ["| not measured | layers | models | reason |", "| --- | --- | --- | --- |"]
    for (quantity, reason), models in sorted(found.reasons.items()):
        names = ", ".join(list(models)[:6]) + (f" and {len(models) - 6} more" if len(models) > 6 else "")
        lines.append(f"| {quantity} | {sum(models.values())} | {names} | {reason} |")
    return [*lines, ""]


def main(arguments: Sequence[str] | None = None) -> int:
    """Observe, print and write the report; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--every", type=int, default=1, help="look at every so many models only")
    parser.add_argument("--report", type=Path, help="Markdown file to write")
    options = parser.parse_args(arguments)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", *SOURCES[::-1]))
    lines = [
        "# Attention that is observed while it runs: all models that can be built here",
        "",
        f"{datetime.date.today()}, {versions}. Made by `scripts/observation_check.py`, which says how.",
        "",
    ]
    faults = 0
    for source in options.source:
        found = check(source, options.every)
        faults += len(found.faults)
        part = lines_of(source, found)
        print("\n".join(part), flush=True)
        lines += part
    if options.report is not None:
        options.report.write_text("\n".join(lines))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
