"""The callback that measures the conditioning of attention while training."""

import re
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lit_cond.callbacks.coverage import Coverage, raise_first, stop_training
from lit_cond.callbacks.monitor_charts import OVER_LAYERS, MonitorCharts
from lit_cond.callbacks.monitor_checks import check_order, compiled_code
from lit_cond.callbacks.reduction import mean_over_processes, refuse_unequal_batches
from lit_cond.callbacks.stop_rule import StopRule
from lit_cond.errors import ConfigurationError, LitCondWarning, NoMatchingTargetError
from lit_cond.measuring.collection import over_layers
from lit_cond.measuring.install import Probes
from lit_cond.measuring.quantities import STATISTICS
from lit_cond.measuring.step import FACTORS, QUANTITIES, MeasuredStep, MeasuringSettings, Quantity
from lit_cond.surgery.find import find_attention
from lit_cond.surgery.sharding import whole_parameters
from lit_cond.surgery.sites import ROLES, AttentionSite, clean_name
from lit_cond.surgery.token_sites import TokenSite, find_token_sites
from lit_cond.surgery.tokens import token_forwards

__all__ = ["ConditionNumberMonitor"]

# How many times the interval `every_n_steps` a quantity waits: a Jacobian costs more than a weight.
_PATIENCE = {"scores": 10, "attention": 10, "jacobian": 10, "jacobian_bound": 10, "spectrum": 10}


class ConditionNumberMonitor(Callback):
    """Measures the conditioning of attention and logs it; changes nothing in the training.

    A condition number is the largest over the smallest singular value, dimensionless, >= 1; of a singular matrix it is
    `inf`. Weights and tokens of float32 (or narrower) numbers count as singular above 8.4e6, where rounding decides;
    scores, outputs and Jacobians are computed from them in float64 and do so above 1e9.

    | quantity | what is measured | each | cost, ViT-B on two CPU cores |
    | --- | --- | --- | --- |
    | `query`, `key`, `value` | the weight as the forward pass reads it (out x in) | layer | 0.5 s |
    | `tokens` | the tokens of a sample as the first block reads them (tokens x channels) | block | 0.01 s |
    | `entropy` | how concentrated the softmax is | layer | 0.3 s |
    | `scores` | the softmax matrix (queries x keys), as it leaves the softmax | head | 0.5 s |
    | `attention` | what a head returns, P V (queries x channels) | head | 0.1 s |
    | `jacobian` | derivative of a head's output by W_Q, W_K, W_V, exact up to `jacobian_rows` rows | head | 0.8 s |
    | `jacobian_bound` | right-hand side of Theorem 3.4 for that | head | 2.9 s |

    A larger Jacobian is measured at some of the tokens: by interlacing its condition number is a lower bound. The bound
    takes the derivative of the softmax over its range, since as it stands it is singular and the bound infinite (see
    `lit_cond.functional.jacobian_bound`).

    | key | what, unit |
    | --- | --- |
    | `cond/<quantity>/<layer>` | condition number; mean over samples and heads that have a finite one |
    | `cond_raw/<quantity>/<layer>` | the same without the correction, of corrected weights and tokens |
    | `entropy/scores/<layer>` | mean entropy of the rows of the softmax, nats |
    | `entropy_share/scores/<layer>` | the same over the log of how many keys may be seen: uniform attention has 1 |
    | `saturated/scores/<layer>` | share of rows whose largest probability is at least 0.99 |
    | `bound/<factor>/<layer>` | its factors: kappa of tokens, query, key, value, scores, softmax_derivative |
    | `sigma_max/...`, `sigma_min/...` | largest and smallest singular value, in units of the matrix |
    | `stable_rank/...`, `effective_rank/...`, `numerical_rank/...` | ranks, graded or counted |
    | `<statistic>/<quantity>/mean`, `/max` or `/min` | over layers; the mean over those that have a finite number |
    | `cond/<quantity>/nonfinite` | how many layers have no finite number; logged when there is one |
    | `skipped/<quantity>` | how many samples had no token (padding only); logged when there is one |

    The x axis is the optimizer step: values at step 0 are those before the first update. What is said over layers can
    be monitored by `ModelCheckpoint` and is there before the first validation; numbers of single layers go to loggers
    only. Padding does not count. Condition numbers of weights are right to 1 %; at the interval of `spectrum` all
    singular values are computed, for TensorBoard's histograms (log10 of singular values relative to the largest),
    figures of spectra, and ranks that need them. TensorBoard also gets heat maps (layers against steps), a layout of
    charts (tab "Custom Scalars") and a table of what is measured and what not, and why.

    Queries, keys and values are seen where attention is computed, whatever kernel computes it; the softmax is computed
    anew in the measured step. Compiled modules are run a second time in measured steps, eagerly and without gradients.
    A LightningModule that is compiled as a whole shows its weights only.

    Args:
        every_n_steps: Interval in optimizer steps.
        quantities: Which quantities; all that the model allows when omitted. A named one that a layer does not allow is
            an error.
        intervals: Intervals of single quantities, or of `spectrum`, in optimizer steps; `every_n_steps` for weights,
            tokens and entropy and ten times that for the others when omitted.
        statistics: Which of `sigma_max`, `sigma_min`, `stable_rank`, `effective_rank`, `numerical_rank` to log beside
            condition numbers.
        raw: Whether to measure also what the weights and tokens are without their corrections.
        include: Which attention layers: a regular expression matched in full, or a list of names or dotted endings; all
            when omitted.
        exclude: Which attention layers to leave out.
        histogram: Whether to log histograms and figures of singular values.
        heatmap: Whether to log heat maps (needs matplotlib).
        per_head: Whether to log numbers of single heads too, `<key of the layer>/head_<i>`.
        max_samples: How many samples of a batch the tokens and the entropy look at; the entropy of fewer where their
            softmax matrices hold more than a million numbers.
        matrix_samples: How many samples the scores, attention and Jacobians look at.
        max_queries: How many queries of a sample the scores and the entropy look at, evenly spread: of a longer
            sequence the condition number of the scores is a lower bound (interlacing).
        jacobian_rows: Up to how many outputs (tokens times channels) of a head its Jacobian is measured: time grows
            with the cube, memory with the square, 8 bytes each.
        stop_when: Ends the training when a logged number says so: `"cond/tokens/max > 1e6 for 100 steps"`, see
            `StopRule`. The reason is printed and written to `condition_stop.json` in the log directory.
        prog_bar: The key that is shown in the progress bar; None for none.

    Raises:
        ConfigurationError: If an argument can not be used.

    Example::

        Trainer(callbacks=[ConditionNumberMonitor(every_n_steps=50, stop_when="cond/tokens/max > 1e6")])
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        quantities: list[Quantity] | None = None,
        intervals: dict[str, int] | None = None,
        statistics: list[str] | None = None,
        raw: bool = True,
        include: str | list[str] | None = None,
        exclude: str | list[str] | None = None,
        histogram: bool = True,
        heatmap: bool = True,
        per_head: bool = False,
        max_samples: int = 8,
        matrix_samples: int = 1,
        max_queries: int = 256,
        jacobian_rows: int = 320,
        stop_when: str | None = None,
        prog_bar: str | None = "cond/query/mean",
    ) -> None:
        counts = {
            "every_n_steps": every_n_steps,
            "max_samples": max_samples,
            "matrix_samples": matrix_samples,
            "max_queries": max_queries,
            "jacobian_rows": jacobian_rows,
            **{f"intervals[{name!r}]": value for name, value in (intervals or {}).items()},
        }
        for name, count in counts.items():
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ConfigurationError(f"`{name}` must be a whole number >= 1, got {count!r}")
        _all_known("quantities", quantities or (), QUANTITIES)
        _all_known("statistics", statistics or (), STATISTICS)
        statistics = ["stable_rank"] if statistics is None else list(statistics)
        _all_known("intervals", intervals or (), (*QUANTITIES, "spectrum"))
        if quantities is not None and not quantities:
            raise ConfigurationError("`quantities` is empty; leave it out to measure all")
        self.every_n_steps = every_n_steps
        self.quantities: tuple[Quantity, ...] = QUANTITIES if quantities is None else tuple(quantities)
        self.required = quantities is not None
        self.intervals = {
            name: (intervals or {}).get(name, every_n_steps * _PATIENCE.get(name, 1))
            for name in (*self.quantities, "spectrum")
        }
        self.settings = MeasuringSettings(
            tuple(statistics), raw, per_head, max_samples, matrix_samples, max_queries, jacobian_rows
        )
        self.include = include
        self.exclude = exclude
        self.histogram = histogram
        self.heatmap = heatmap
        self.stop_rule = None if stop_when is None else StopRule.parse(stop_when)
        self.prog_bar = prog_bar
        self._measured_at: dict[str, int] = {}
        self._last: dict[str, float] = {}
        self._resumed = False
        # What lives while a training runs.
        self._sites: list[AttentionSite] = []
        self._token_sites: list[TokenSite] = []
        self._seeable: tuple[Quantity, ...] = self.quantities
        self._current: MeasuredStep | None = None
        self._probes: Probes | None = None
        self._charts = MonitorCharts(histogram, heatmap)
        self._coverage = Coverage()
        self._step = self._count = 0
        self._spent = self._began = 0.0

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(
            quantities=self.quantities,
            include=self.include,
            exclude=self.exclude,
            intervals=self.intervals,
            settings=self.settings,
        )

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin anew with a new training; a resume restores the state after this."""
        if stage == "fit" and trainer.global_step == 0:
            self._measured_at, self._last, self._resumed = {}, {}, False
            if self.stop_rule is not None:
                self.stop_rule.reset()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find what to measure.

        Raises:
            NoMatchingTargetError: If there is nothing of the kind in the model.
            ConfigurationError: If the stop rule reads what is not measured, or attention is asked for in a module that
                is compiled as a whole.
        """
        self._release()
        self._step, self._count, self._spent = 0, 0, 0.0
        with whole_parameters(trainer.model):
            self._find(pl_module)
        self._seeable = self.quantities
        obstacle = compiled_code(pl_module)
        if obstacle is not None:
            self._seeable = tuple(quantity for quantity in self.quantities if quantity in ROLES)
            if self._seeable != self.quantities:
                if self.required:
                    raise ConfigurationError(obstacle)
                warnings.warn(obstacle, LitCondWarning, stacklevel=2)
        check_order(trainer, self)
        if self.stop_rule is not None:
            self.stop_rule.check(self._groups())

    def _find(self, pl_module: LightningModule) -> None:
        if set(self.quantities) != {"tokens"}:
            self._sites = find_attention(pl_module, self.include, self.exclude)
        if "tokens" in self.quantities:
            # The blocks whose tokens are corrected, else the block where they enter.
            names = "|".join(re.escape(clean_name(name)) for name, _ in token_forwards(pl_module)) or None
            try:
                self._token_sites = find_token_sites(pl_module, names)
            except NoMatchingTargetError as error:
                if self.required:
                    raise
                warnings.warn(f"tokens: not measured: {error}", LitCondWarning, stacklevel=2)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        refuse_unequal_batches(trainer)
        self._began = time.perf_counter()

    @override
    @torch.no_grad()
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Measure the weights, and prepare to look at this forward pass, where an interval asks for it."""
        if self._resumed:
            # Callbacks that monitor a value find it before the first validation after a resume too. What is there by
            # ExactResume stays: logged in two hooks, the value of this one would hide those to come.
            known = trainer.callback_metrics
            self._log_metrics(pl_module, {key: value for key, value in self._last.items() if key not in known})
            self._resumed = False
        step = trainer.global_step
        due = {name for name, n in self.intervals.items() if step // n != self._measured_at.get(name, -1) // n}
        full = "spectrum" in due
        due.discard("spectrum")
        due &= set(self._seeable)
        if not due:
            return
        start = time.perf_counter()
        self._measured_at.update((name, step) for name in (*due, *(("spectrum",) if full else ())))
        self._step = step
        self._current = MeasuredStep(self._sites, self._token_sites, frozenset(due), full, self.settings)
        with whole_parameters(trainer.model):
            self._current.measure_weights()
        self._probes = Probes(pl_module, self._current.probes())
        self._probes.__enter__()
        self._spent += time.perf_counter() - start

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what was measured.

        Raises:
            ConfigurationError: If a quantity that `quantities` asks for can not be measured in a layer.
        """
        if self._current is None:
            return
        start = time.perf_counter()
        self._close_probes()
        current = self._current
        self._current = None
        self._tell(trainer, pl_module, current)
        values = over_layers(mean_over_processes(trainer, current.found.values, current.expected()))
        skipped = mean_over_processes(trainer, current.found.skipped, list(current.found.skipped))
        values.update((f"skipped/{q}", count * trainer.world_size) for q, count in skipped.items() if count > 0)
        self._last.update((key, value) for key, value in values.items() if _is_over_layers(key))
        self._log_metrics(pl_module, values)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=self._step)
        self._charts.draw(trainer, self._step, current.found.spectra, values, full=current.full)
        self._count += 1
        self._spent += current.seconds + time.perf_counter() - start
        self._stop(trainer, values)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        start = time.perf_counter()
        self._charts.finish(trainer)
        self._spent += time.perf_counter() - start
        whole = time.perf_counter() - self._began
        if self._count:
            rank_zero_info(
                f"condition numbers: measured in {self._count} steps, which took {self._spent:.1f} s of {whole:.1f} s"
            )

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    @override
    def state_dict(self) -> dict[str, Any]:
        rule = {} if self.stop_rule is None else {"stop_rule": self.stop_rule.state_dict()}
        return {"measured_at": dict(self._measured_at), "last": dict(self._last), **rule}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._measured_at = dict(state_dict["measured_at"])
        self._last = dict(state_dict["last"])
        self._resumed = bool(self._last)
        if self.stop_rule is not None:
            self.stop_rule.load_state_dict(state_dict.get("stop_rule", {}))

    def _groups(self) -> set[str]:
        """Return the first two parts of all keys that can be logged."""
        groups = set()
        for quantity in self.quantities:
            if quantity == "entropy":
                groups |= {"entropy/scores", "entropy_share/scores", "saturated/scores"}
                continue
            groups |= {f"{name}/{quantity}" for name in ("cond", *self.settings.statistics)}
            if quantity in (*ROLES, "tokens") and self.settings.raw:
                groups.add(f"cond_raw/{quantity}")
            if quantity == "jacobian_bound":
                groups |= {f"bound/{factor}" for factor in FACTORS}
        return groups | {f"skipped/{quantity}" for quantity in self.quantities}

    def _tell(self, trainer: Trainer, pl_module: LightningModule, current: MeasuredStep) -> None:
        """Say what was not measured, and why, when it is the first time; raise where it was asked for."""
        if self.required:
            raise_first(current.failures)
        if self._coverage.note(current.failures | current.absent()) or not self._count:
            layers = {str(quantity): self._layers(quantity) for quantity in self._seeable}
            self._coverage.tell(trainer, pl_module, layers, self._sites)

    def _layers(self, quantity: Quantity) -> list[str]:
        return [site.name for site in (self._token_sites if quantity == "tokens" else self._sites)]

    def _log_metrics(self, pl_module: LightningModule, values: Mapping[str, float]) -> None:
        """Hand what is said over layers to callbacks and the progress bar; loggers get all with their own step."""
        for key, value in values.items():
            if _is_over_layers(key) or key == self.prog_bar:
                pl_module.log(
                    key,
                    value,
                    on_step=True,
                    on_epoch=False,
                    logger=False,
                    prog_bar=key == self.prog_bar,
                    batch_size=1,
                )

    def _stop(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        reason = None if self.stop_rule is None else self.stop_rule.update(self._step, values)
        if reason is not None and not trainer.should_stop:
            stop_training(trainer, reason, self._step, values)

    def _close_probes(self) -> None:
        if self._probes is not None:
            self._probes.__exit__(None, None, None)
            self._probes = None

    def _release(self) -> None:
        """Leave nothing behind in the model, and keep nothing of it."""
        self._close_probes()
        self._current, self._sites, self._token_sites = None, [], []
        self._charts, self._coverage = MonitorCharts(self.histogram, self.heatmap), Coverage()


def _all_known(argument: str, given: Any, known: Any) -> None:
    if isinstance(given, str):
        raise ConfigurationError(f"`{argument}` is a list, got {given!r}; write [{given!r}]")
    for name in given:
        if name not in known:
            raise ConfigurationError(f"`{argument}` may hold {', '.join(known)}, got {name!r}")


def _is_over_layers(key: str) -> bool:
    return key.rpartition("/")[2] in OVER_LAYERS or key.startswith("skipped/")
