"""What measuring costs, as ratios of times taken in turn in one process.

    python scripts/benchmark_monitors.py [--only weights jacobian monitor] [--rounds 5] [--threads 1]

Parts:

- weights: the two ends of the spectra of 36 weights of 768 x 768 (a ViT-B: query, key and value of 12 layers), against
  `torch.linalg.cond` matrix by matrix, for weights as they are initialised and as spectral conditioning leaves them.
- jacobian: the Jacobians of all 16 heads of the digits model (17 tokens, 64 wide, 16 channels a head), against
  `torch.autograd.functional.jacobian` in float64: condition numbers by us against the forming of the matrices head by
  head, against condition numbers from their singular values, and against the same where a layer is differentiated at
  once, which is how one would write it.

- monitor: a training of a timm model by Lightning with `ConditionNumberMonitor`, quantity by quantity, and all of them
  at their default intervals.

"ratio" is the median over rounds of the other's time over ours, "worst" its smallest; "error" is the largest relative
error of ours against a float64 SVD of the same numbers, "other's" that of the other.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lit_cond.callbacks import ConditionedTokens, ConditionNumberMonitor, SpectralConditioning
from lit_cond.functional import (
    attention_jacobian_spectra,
    attention_probabilities,
    extreme_singular_values,
    spectral_correction,
)
from lit_cond.measuring.step import QUANTITIES
from lit_cond.surgery.parallel import side_by_side

NUMBER, SIZE = 36, 768  # weights of a ViT-B
LAYERS, HEADS, TOKENS, WIDTH, CHANNELS = 4, 4, 17, 64, 16  # configs/image_classification/digits_vit.yaml


@dataclass
class Comparison:
    """Times of two ways to the same numbers, in seconds, one pair a round."""

    name: str
    other: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    error: float = 0.0
    other_error: float = 0.0

    def row(self) -> str:
        """Return one line of the table."""
        ratios = [other / ours for other, ours in zip(self.other, self.ours, strict=True)]
        return (
            f"{self.name:44} {statistics.median(self.other) * 1e3:10.1f} {statistics.median(self.ours) * 1e3:9.1f} "
            f"{statistics.median(ratios):7.2f} {min(ratios):7.2f} {self.error:9.1e} {self.other_error:9.1e}"
        )


def seconds(function: Callable[[], object]) -> float:
    """Return the time that a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def relative_error(found: Sequence[float], true: Sequence[float]) -> float:
    """Return the largest relative error."""
    return max(abs(a / b - 1) for a, b in zip(found, true, strict=True))


def compare_weights(rounds: int) -> list[Comparison]:
    """Compare the ends of spectra with condition numbers."""
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(SIZE, SIZE, generator=generator) * 0.02 for _ in range(NUMBER)]
    results = []
    for kind, weights in {"initial": plain, "conditioned": [w + spectral_correction(w) for w in plain]}.items():
        alone, together = Comparison(f"{NUMBER} weights, {kind}"), Comparison(f"{NUMBER} weights, {kind}, side by side")
        for _ in range(rounds):
            others, ours = [], []
            for w in weights:  # in turn, so that a busy machine slows both
                others.append(seconds(lambda w=w: torch.linalg.cond(w)))  # type: ignore[misc]
                ours.append(seconds(lambda w=w: extreme_singular_values(w)))  # type: ignore[misc]
            alone.other.append(sum(others))
            alone.ours.append(sum(ours))
            if torch.get_num_threads() > 1:
                together.other.append(sum(others))
                together.ours.append(seconds(lambda: side_by_side(extreme_singular_values, weights, weights)))  # noqa: B023
        true = [torch.linalg.svdvals(w.double()) for w in weights]
        ends = [extreme_singular_values(w) for w in weights]
        alone.error = max(
            relative_error([float(a), float(b)], [float(s[0]), float(s[-1])])
            for (a, b), s in zip(ends, true, strict=True)
        )
        alone.other_error = relative_error(
            [float(torch.linalg.cond(w)) for w in weights], [float(s[0] / s[-1]) for s in true]
        )
        together.error, together.other_error = alone.error, alone.other_error
        results += [alone, together] if together.ours else [alone]
    return results


def compare_jacobians(rounds: int) -> list[Comparison]:
    """Compare the closed form of the Jacobian with autograd."""
    generator = torch.Generator().manual_seed(0)
    scale = CHANNELS**-0.5

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    layers = [(draw(TOKENS, WIDTH), draw(3, HEADS, CHANNELS, WIDTH) / WIDTH**0.5) for _ in range(LAYERS)]

    def autograd(x: Tensor, weights: Tensor) -> Tensor:
        def output(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            p: Tensor = (scale * (x @ query.mT) @ (x @ key.mT).mT).softmax(dim=-1)
            return p @ (x @ value.mT)

        parts: tuple[Tensor, ...] = torch.autograd.functional.jacobian(output, tuple(weights))  # type: ignore[no-untyped-call]
        whole: Tensor = torch.cat([part.flatten(2).flatten(0, 1) for part in parts], dim=1)
        return whole

    def conditions_by_autograd(x: Tensor, weights: Tensor) -> list[float]:
        spectra = (torch.linalg.svdvals(autograd(x, weights[:, head])) for head in range(HEADS))
        return [float(values[0] / values[-1]) for values in spectra]

    def conditions(x: Tensor, weights: Tensor) -> list[float]:
        q, k, v = x @ weights.mT
        p = attention_probabilities(q, k, scale)
        return [spectrum.condition for spectrum in attention_jacobian_spectra(x, x, x, q, k, v, p, scale)]

    def conditions_by_layer(x: Tensor, weights: Tensor) -> list[float]:
        def output(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            p: Tensor = (scale * (x @ query.mT) @ (x @ key.mT).mT).softmax(dim=-1)
            return p @ (x @ value.mT)

        parts: tuple[Tensor, ...] = torch.autograd.functional.jacobian(output, tuple(weights))  # type: ignore[no-untyped-call]
        found = []
        for head in range(HEADS):  # a head's output depends on its own weights alone
            blocks = [part[head, :, :, head].flatten(2).flatten(0, 1) for part in parts]
            values = torch.linalg.svdvals(torch.cat(blocks, dim=1))
            found.append(float(values[0] / values[-1]))
        return found

    matrix = Comparison(f"{LAYERS * HEADS} Jacobians, by autograd alone; ours: kappa")
    layerwise = Comparison(f"{LAYERS * HEADS} Jacobians, kappa, by layer")
    number, together = (
        Comparison(f"{LAYERS * HEADS} Jacobians, kappa"),
        Comparison(f"{LAYERS * HEADS} Jacobians, kappa, side by side"),
    )
    for _ in range(rounds):
        formed, others, whole, ours = [], [], [], []
        for x, weights in layers:
            formed.append(seconds(lambda x=x, w=weights: [autograd(x, w[:, head]) for head in range(HEADS)]))  # type: ignore[misc]
            others.append(seconds(lambda x=x, w=weights: conditions_by_autograd(x, w)))  # type: ignore[misc]
            whole.append(seconds(lambda x=x, w=weights: conditions_by_layer(x, w)))  # type: ignore[misc]
            ours.append(seconds(lambda x=x, w=weights: conditions(x, w)))  # type: ignore[misc]
        matrix.other.append(sum(formed))
        number.other.append(sum(others))
        layerwise.other.append(sum(whole))
        layerwise.ours.append(sum(ours))
        matrix.ours.append(sum(ours))
        number.ours.append(sum(ours))
        if torch.get_num_threads() > 1:
            together.other.append(sum(others))
            together.ours.append(seconds(lambda: side_by_side(lambda layer: conditions(*layer), layers, [])))
    for layer in layers:
        number.error = max(number.error, relative_error(conditions(*layer), conditions_by_autograd(*layer)))
    matrix.error = layerwise.error = together.error = number.error
    return [matrix, number, layerwise, *([together] if together.ours else [])]


def measure_monitor(rounds: int, model: str, batch_size: int, conditioned: bool) -> list[str]:
    """Return the cost of every quantity in a training by Lightning, and of all at their default intervals.

    Each quantity is measured in every second step; what a measured step takes longer than the one after it, divided by
    the interval, is its share of every step.
    """
    results = {}
    step_times: list[float] = []
    for group, names in GROUPS.items():
        measured, plain = _paired_steps(names, rounds, model, batch_size, conditioned)
        step_times += plain
        results[group] = statistics.median(a - b for a, b in zip(measured, plain, strict=True))
    step = statistics.median(step_times)
    defaults = ConditionNumberMonitor().intervals
    lines = [f"{model}, batch {batch_size}: a step takes {step:.2f} s (quartiles {_quartiles(step_times)})"]
    total = 0.0
    for group, cost in results.items():
        # The last name: of the whole spectra of weights, measured with the weights, that of the spectra.
        interval = defaults[GROUPS[group][-1]]
        total += cost / interval
        lines.append(
            f"{group:28} {cost:8.2f} s every {interval:5} steps: {100 * cost / interval / step:6.2f} % of a step"
        )
    lines.append(f"{'all, at default intervals':28} {'':28} {1 + total / step:.4f} of the step without monitor")
    return lines


GROUPS = {
    "query, key, value": ("query", "key", "value"),
    "all singular values of these": ("query", "key", "value", "spectrum"),
    "tokens": ("tokens",),
    "entropy": ("entropy",),
    "scores": ("scores",),
    "attention": ("attention",),
    "jacobian": ("jacobian",),
    "jacobian_bound": ("jacobian_bound",),
}


class _Classifier(LightningModule):
    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class _Clock(Callback):
    """Listed first and last: the time of each step with what the callbacks between do."""

    def __init__(self, times: list[float], sign: int) -> None:
        self.times = times
        self.sign = sign

    @property
    def state_key(self) -> str:
        return f"clock {self.sign}"

    def on_train_batch_start(self, *args: Any) -> None:
        if self.sign < 0:
            self.times.append(-time.perf_counter())

    def on_train_batch_end(self, *args: Any) -> None:
        if self.sign > 0:
            self.times[-1] += time.perf_counter()


def _paired_steps(
    names: Sequence[str], rounds: int, model: str, batch_size: int, conditioned: bool
) -> tuple[list[float], list[float]]:
    """Return the times of steps that measure some quantities, and of the steps right after them."""
    torch.manual_seed(0)
    network: Any = timm.create_model(model)
    net = _Classifier(network)
    batch = (torch.randn(batch_size, *network.pretrained_cfg["input_size"]), torch.randint(0, 1000, (batch_size,)))
    batches: Any = [batch] * (2 * rounds + 2)
    loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)
    never = 10**9
    monitor = ConditionNumberMonitor(
        intervals={name: 2 if name in names else never for name in (*QUANTITIES, "spectrum")}
    )
    times: list[float] = []
    corrections = [SpectralConditioning(), ConditionedTokens()] if conditioned else []
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=TensorBoardLogger(folder),
            callbacks=[_Clock(times, -1), *corrections, monitor, _Clock(times, 1)],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(net, loader)
    # The first pair measures everything, and warms up.
    return times[2::2], times[3::2]


def _quartiles(values: Sequence[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:.2f} - {high:.2f}"


PARTS: dict[str, Callable[[int], list[Comparison]]] = {"weights": compare_weights, "jacobian": compare_jacobians}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=[*PARTS, "monitor"], default=[*PARTS, "monitor"], help="parts to run"
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each part is run")
    parser.add_argument("--threads", type=int, help="threads of torch; its own choice if left out")
    parser.add_argument("--model", default="vit_base_patch16_224", help="model of timm, for the part monitor")
    parser.add_argument("--batch-size", type=int, default=4, help="its batch size")
    parser.add_argument("--conditioned", action="store_true", help="its weights and tokens carry corrections")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.rounds} rounds")
    print(
        f"{'':44} {'other ms':>10} {'ours ms':>9} {'ratio':>7} {'worst':>7} {'error':>9} {'other s':>9}".replace(
            "other s", "other's"
        )
    )
    for part in [part for part in options.only if part in PARTS]:
        PARTS[part](1)  # warm
        for comparison in PARTS[part](options.rounds):
            print(comparison.row(), flush=True)
    if "monitor" in options.only:
        for line in measure_monitor(options.rounds, options.model, options.batch_size, options.conditioned):
            print(line, flush=True)


if __name__ == "__main__":
    main()
