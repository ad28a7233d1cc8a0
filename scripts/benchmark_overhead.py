"""Measure what a correction costs: paired, interleaved training steps of a timm model.

Every variant is a copy of one model that shares its parameters and its optimizer, so that many of them fit into memory
and all do the same arithmetic beside the correction. One round times one step of every variant, in an order that
rotates from round to round; the figure of a variant is the median over the rounds of (its step / the plain step of the
same round), its scatter are the quartiles. The row "plain, again" is the plain model against itself: differences
smaller than its scatter mean nothing.

Example:
    python scripts/benchmark_overhead.py --model vit_base_patch16_224 --batch-size 4 --rounds 15 --json overhead.json
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import lit_cond
from lit_cond.errors import ConfigurationError, LitCondError
from lit_cond.extras import optional_imports
from lit_cond.functional import spectral_correction
from lit_cond.surgery import MatrixLayout, TokenRule, WeightRule, condition_, find_attention, refresh_

PLAIN = "plain"
TOKEN_BACKENDS = ("gram", "svd", "products")


class SpectralEveryForward(nn.Module):
    """Parametrization that decomposes the weight whenever it is read: the exact variant as the paper describes it.

    Args:
        layouts: Places of the query, key and value matrices in the weight.
    """

    def __init__(self, layouts: Sequence[MatrixLayout]) -> None:
        super().__init__()
        self.layouts = tuple(layouts)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight plus its correction, which is a constant for the backward pass."""
        correction = torch.zeros_like(weight)
        for layout in self.layouts:
            layout.scatter_(correction, spectral_correction(layout.matrix(weight.detach())))
        return weight + correction


def spectral_every_forward_(model: nn.Module) -> None:
    """Register `SpectralEveryForward` on every parameter that holds a query, key or value matrix."""
    layouts: dict[tuple[nn.Module, str], list[MatrixLayout]] = defaultdict(list)
    for site in find_attention(model):
        for _, view in site:
            layouts[view.module, view.tensor_name].append(view.layout)
    for (module, name), places in layouts.items():
        parametrize.register_parametrization(module, name, SpectralEveryForward(places))


def variants(identity_scale: float, refresh_every: int) -> dict[str, Callable[[nn.Module], None]]:
    """Return what each variant does to a model, by the name that the table shows."""

    def weights(**rule: Any) -> Callable[[nn.Module], None]:
        return lambda model: condition_(model, WeightRule(**rule))

    def tokens(**rule: Any) -> Callable[[nn.Module], None]:
        return lambda model: condition_(model, TokenRule(**rule))

    return {
        PLAIN: lambda model: None,
        "plain, again": lambda model: None,
        f"weights, identity {identity_scale:g}": weights(correction="identity", scale=identity_scale),
        "weights, spectral fixed": weights(correction="spectral"),
        _refreshed(refresh_every): weights(correction="spectral"),
        "weights, spectral by SVD at every forward": spectral_every_forward_,
        f"tokens, identity {identity_scale:g}": tokens(correction="identity", scale=identity_scale),
        **{f"tokens, exact by {backend}": tokens(correction="exact", backend=backend) for backend in TOKEN_BACKENDS},
    }


def _refreshed(every: int) -> str:
    return f"weights, spectral refreshed every {every}"


@dataclass
class Result:
    """Times of one variant in seconds, one entry a round."""

    steps: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Return the median step and the median and quartiles of the ratio to plain."""
        ratios = self.ratios if len(self.ratios) > 1 else self.ratios * 2
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return {
            "seconds": statistics.median(self.steps),
            "ratio": middle,
            "ratio_lower_quartile": low,
            "ratio_upper_quartile": high,
        }


class Benchmark:
    """Copies of one model that share parameters and optimizer, and the batch that they train on.

    Args:
        model: The plain model.
        batch: Images and labels.
        chosen: What each variant does to its copy; the first is the plain one.
        refresh_every: Interval over which the cost of a refresh is spread.
        clock: Returns seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: tuple[Tensor, Tensor],
        chosen: dict[str, Callable[[nn.Module], None]],
        refresh_every: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.images, self.labels = batch
        self.clock = clock
        self.refresh_every = refresh_every
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        shared = {id(parameter): parameter for parameter in model.parameters()}
        self.models: dict[str, nn.Module] = {}
        for name, change in chosen.items():
            # Every second of this loop is set-up, not measured.
            self.models[name] = copy.deepcopy(model, dict(shared))
            change(self.models[name])

    def seconds(self, work: Callable[[], object]) -> float:
        """Return how long `work` takes, to the end of what it started on an accelerator."""
        self._synchronize()
        start = self.clock()
        work()
        self._synchronize()
        return self.clock() - start

    def _synchronize(self) -> None:
        if self.images.device.type == "cuda":
            torch.cuda.synchronize(self.images.device)

    def step(self, name: str) -> None:
        """Train one variant for one step."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self.models[name](self.images), self.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def run(self, rounds: int, warmup: int, report: Callable[[str], None]) -> dict[str, Result]:
        """Time all variants.

        Args:
            rounds: Rounds that count.
            warmup: Rounds before them that do not.
            report: Called with a line of progress after each round.
        """
        names = list(self.models)
        results = {name: Result() for name in names}
        gc.collect()
        gc.disable()  # a collection would fall on one variant of a round
        try:
            for number in range(-warmup, rounds):
                turn = number % len(names)
                times = {name: self._time(name) for name in names[turn:] + names[:turn]}
                gc.collect()
                if number >= 0:
                    for name in names:
                        results[name].steps.append(times[name])
                        results[name].ratios.append(times[name] / times[PLAIN])
                report(f"round {number + 1}/{rounds}: plain {times[PLAIN]:.3f} s, all {sum(times.values()):.1f} s")
        finally:
            gc.enable()
        return results

    def _time(self, name: str) -> float:
        elapsed = self.seconds(lambda: self.step(name))
        if name == _refreshed(self.refresh_every):
            elapsed += self.seconds(lambda: refresh_(self.models[name])) / self.refresh_every
        return elapsed


def table(results: dict[str, Result]) -> str:
    """Return the results as a Markdown table."""
    width = max(map(len, results))
    lines = [
        f"| {'variant':{width}} | step [s] | / plain | quartiles     |",
        f"| {'-' * width} | -------: | ------: | ------------- |",
    ]
    for name, result in results.items():
        s = result.summary()
        quartiles = f"{s['ratio_lower_quartile']:.3f} - {s['ratio_upper_quartile']:.3f}"
        lines.append(f"| {name:{width}} | {s['seconds']:8.3f} | {s['ratio']:7.3f} | {quartiles} |")
    return "\n".join(lines)


def build(name: str, image_size: int | None, batch_size: int, device: torch.device) -> tuple[nn.Module, Any]:
    """Return a freshly initialised timm model in training mode and a batch of Gaussian images.

    Args:
        name: Name in timm.
        image_size: Side of the images in pixels; None for the model's own.
        batch_size: Number of images.
        device: Where both shall be.

    Raises:
        ConfigurationError: The name is unknown to timm or the model can not take such images.
    """
    with optional_imports("the benchmark"):
        import timm
    if not timm.is_model(name):
        near = timm.list_models(f"*{name.split('_')[0]}*")[:3]
        hint = f"; such names are {', '.join(near)}" if near else ""
        raise ConfigurationError(f"--model {name} is unknown to timm{hint}.")
    torch.manual_seed(0)
    options = {} if image_size is None else {"img_size": image_size}
    try:
        model: nn.Module = timm.create_model(name, **options)
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigurationError(f"--image-size {image_size} does not fit {name}: {error}.") from error
    side = image_size or int(timm.data.resolve_model_data_config(model)["input_size"][-1])
    images = torch.randn(batch_size, 3, side, side)
    labels = torch.randint(0, 1000, (batch_size,))
    return model.to(device).train(), (images.to(device), labels.to(device))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too small; give at least 1")
    return value


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", default="vit_base_patch16_224", help="timm model (default: %(default)s)")
    parser.add_argument("--batch-size", type=_positive, default=4, help="images a step (default: %(default)s)")
    parser.add_argument("--image-size", type=_positive, help="side in pixels (default: the model's own)")
    parser.add_argument("--rounds", type=_positive, default=15, help="rounds that count (default: %(default)s)")
    parser.add_argument("--warmup", type=_positive, default=1, help="rounds before them (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="torch device (default: %(default)s)")
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: processor time of this process, for a shared machine; set OMP_NUM_THREADS=1 (default: wall)",
    )
    parser.add_argument(
        "--refresh-every", type=_positive, default=100, help="steps over which a refresh is spread (default: 100)"
    )
    parser.add_argument(
        "--identity-scale",
        type=float,
        default=1.0,
        help="scale of the identity (default: 1; at 10 a saturated softmax adds the cost of denormal numbers)",
    )
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only variants whose name contains one of these")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every time and ratio to this file as well")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    arguments = parse(argv)
    try:
        chosen = variants(arguments.identity_scale, arguments.refresh_every)
        if arguments.only:
            chosen = {k: v for k, v in chosen.items() if k == PLAIN or any(text in k for text in arguments.only)}
            if list(chosen) == [PLAIN]:
                raise ConfigurationError(f"--only {' '.join(arguments.only)} matches no variant; see --help.")
        device = torch.device(arguments.device)
        model, batch = build(arguments.model, arguments.image_size, arguments.batch_size, device)
        clock = time.perf_counter if arguments.clock == "wall" else time.process_time
        if clock is time.process_time and (device.type != "cpu" or torch.get_num_threads() > 1):
            raise ConfigurationError("--clock cpu sees one thread of the CPU; set OMP_NUM_THREADS=1 and --device cpu.")
        load = _load()
        print(f"{arguments.model}, batch {arguments.batch_size}, {device}, load before the start {load}")
        benchmark = Benchmark(model, batch, chosen, arguments.refresh_every, clock)
        results = benchmark.run(arguments.rounds, arguments.warmup, lambda line: print(line, flush=True))
    except (LitCondError, RuntimeError) as error:
        print(f"benchmark_overhead: {error}", file=sys.stderr)
        return 2
    print(table(results))
    if arguments.json is not None:
        record = {
            "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()},
            "versions": _versions(),
            "machine": _machine(device, load),
            "results": {
                name: {**result.summary(), "steps": result.steps, "ratios": result.ratios}
                for name, result in results.items()
            },
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


def _versions() -> dict[str, str]:
    import timm

    return {
        "lit_cond": lit_cond.__version__,
        "python": platform.python_version(),
        "timm": timm.__version__,
        "torch": torch.__version__,
    }


def _machine(device: torch.device, load: list[float]) -> dict[str, Any]:
    return {
        "processor": platform.processor() or platform.machine(),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": load,
        "load_after": _load(),
    }


def _load() -> list[float]:
    """Return the load averages of 1, 5 and 15 minutes, where the system keeps them."""
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else []


if __name__ == "__main__":
    sys.exit(main())
