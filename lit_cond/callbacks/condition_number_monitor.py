"""The callback that measures condition numbers while training."""

import math
import re
import warnings
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override

from lit_cond.callbacks.charts import HeatMap, log_figure, log_histogram
from lit_cond.errors import ConfigurationError, LitCondWarning, NoMatchingTargetError
from lit_cond.surgery.find import find_attention
from lit_cond.surgery.report import measure_weights, spectra
from lit_cond.surgery.rules import TokenRule
from lit_cond.surgery.sites import AttentionSite, clean_name
from lit_cond.surgery.token_sites import TokenSite, find_token_sites
from lit_cond.surgery.tokens import TokenForward, token_forwards

__all__ = ["ConditionNumberMonitor"]

Quantity = Literal["query", "key", "value", "tokens"]


class ConditionNumberMonitor(Callback):
    """Logs the condition numbers (largest over smallest singular value, dimensionless, >= 1) of attention.

    | key | what |
    | --- | --- |
    | `cond/query/<layer>`, `cond/key/<layer>`, `cond/value/<layer>` | the weight as the forward pass reads it |
    | `cond/tokens/<block>` | the tokens of a sample as the block reads them, mean over samples |
    | `cond_raw/<quantity>/<layer>` | the same without the correction, where there is one |
    | `cond/<quantity>/mean`, `cond/<quantity>/max` | over the layers that have a finite number |
    | `cond/<quantity>/nonfinite` | how many layers (samples) have none: singular, NaN or Inf; logged when there is
    one |

    The x axis is the optimizer step: values at step 0 are those before the first update. Measuring changes nothing in
    the training. A mean and a maximum can be monitored by `ModelCheckpoint` and are there before the first validation.
    TensorBoard also gets a histogram of the singular values of each quantity relative to the largest (log10) and one
    heat map for each quantity, layers against steps, of log10 of the condition number.

    Cost of one measurement on two cores: about 60 ms for a 768 x 768 weight, twice that with the uncorrected one;
    4 s for a conditioned ViT-B. Raise `every_n_steps` or set `raw=False` where that is too much.

    Args:
        every_n_steps: Interval in optimizer steps.
        quantities: Which of query, key, value and tokens to measure; all when omitted.
        raw: Whether to measure also what the weights and tokens are without their corrections.
        include: Which attention layers: a regular expression matched in full, or a list of names or dotted endings; all
            when omitted.
        exclude: Which attention layers to leave out.
        histogram: Whether to log histograms of singular values.
        heatmap: Whether to log heat maps (needs matplotlib).
        max_samples: How many samples of a batch the token quantity looks at.
        prog_bar: The key that is shown in the progress bar; None for none.

    Raises:
        ConfigurationError: If an argument can not be used.

    Example::

        Trainer(callbacks=[ConditionNumberMonitor(every_n_steps=50)])
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        quantities: list[Quantity] | None = None,
        raw: bool = True,
        include: str | list[str] | None = None,
        exclude: str | list[str] | None = None,
        histogram: bool = True,
        heatmap: bool = True,
        max_samples: int = 8,
        prog_bar: str | None = "cond/query/mean",
    ) -> None:
        for name, count in (("every_n_steps", every_n_steps), ("max_samples", max_samples)):
            if count < 1:
                raise ConfigurationError(f"`{name}` must be >= 1, got {count}")
        known = get_args(Quantity)
        for quantity in quantities or ():
            if quantity not in known:
                raise ConfigurationError(f"`quantities` may hold {', '.join(known)}, got {quantity!r}")
        if quantities is not None and not quantities:
            raise ConfigurationError("`quantities` is empty; leave it out to measure all")
        self.every_n_steps = every_n_steps
        self.quantities: tuple[Quantity, ...] = known if quantities is None else tuple(quantities)
        self.tokens_required = quantities is not None
        self.raw = raw
        self.include = include
        self.exclude = exclude
        self.histogram = histogram
        self.heatmap = heatmap
        self.max_samples = max_samples
        self.prog_bar = prog_bar
        self._measured_at = -1
        self._last: dict[str, float] = {}
        self._resumed = False
        self._pending: dict[str, float] | None = None
        self._spectra: dict[str, list[Tensor]] = {}
        self._sites: list[AttentionSite] = []
        self._token_sites: list[TokenSite] = []
        self._handles: list[Any] = []
        self._maps: dict[str, HeatMap] = {}

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(
            quantities=self.quantities,
            include=self.include,
            exclude=self.exclude,
            every_n_steps=self.every_n_steps,
        )

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin anew with a new training; a resume restores the state after this."""
        if stage == "fit" and trainer.global_step == 0:
            self._measured_at, self._last, self._resumed = -1, {}, False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find what to measure.

        Raises:
            NoMatchingTargetError: If there is nothing of the kind in the model.
        """
        self._maps = {}
        if set(self.quantities) != {"tokens"}:
            self._sites = find_attention(pl_module, self.include, self.exclude)
        if "tokens" in self.quantities:
            # The blocks whose tokens are corrected, else the block where they enter.
            names = "|".join(re.escape(clean_name(name)) for name, _ in token_forwards(pl_module)) or None
            try:
                self._token_sites = find_token_sites(pl_module, names)
            except NoMatchingTargetError as error:
                if self.tokens_required:
                    raise
                warnings.warn(f"tokens are not measured: {error}", LitCondWarning, stacklevel=2)

    @override
    @torch.no_grad()
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Measure the weights, and prepare to see the tokens of this batch, where the interval asks for it."""
        if self._resumed:
            # Callbacks that monitor a value find it before the first validation after a resume too.
            self._log_metrics(pl_module, self._last)
            self._resumed = False
        step = trainer.global_step
        if step // self.every_n_steps == self._measured_at // self.every_n_steps:
            return
        self._measured_at = step
        self._pending, self._spectra = {}, {}
        self._measure_weights(pl_module)
        for site in self._token_sites:
            self._handles.append(site.module.register_forward_pre_hook(_TokenProbe(self, site), with_kwargs=True))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what was measured."""
        if self._pending is None:
            return
        self._remove_hooks()
        values, self._pending = self._summarise(trainer, self._pending), None
        self._last = values
        self._log_metrics(pl_module, values)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=self._measured_at)
        if self.histogram:
            for name, spectrum in self._spectra.items():
                log_histogram(trainer, f"spectrum/{name}", torch.cat(spectrum), self._measured_at)
        self._draw(trainer, values)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log_maps(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"measured_at": self._measured_at, "last": dict(self._last)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._measured_at = state_dict["measured_at"]
        self._last = state_dict["last"]
        self._resumed = bool(self._last)

    def _measure_weights(self, pl_module: LightningModule) -> None:
        for report in measure_weights(pl_module, sites=self._sites):
            if report.role in self.quantities:
                self._note("cond", report.role, report.name, report.effective)
                if self.raw and report.corrections:
                    self._note("cond_raw", report.role, report.name, report.raw)
                self._spectra.setdefault(report.role, []).append(report.spectrum)

    def note_tokens(self, site: TokenSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Measure the tokens of the first samples that enter a block, with and without the correction.

        Raises:
            ConfigurationError: If the tokens can not be read and `quantities` asks for them; else they are left out
                from here on, with a warning.
        """
        if self._pending is None or f"cond/tokens/{site.name}" in self._pending:
            return
        try:
            self._measure_tokens(site, args, kwargs)
        except ConfigurationError as error:
            if self.tokens_required:
                raise
            self._token_sites.remove(site)
            warnings.warn(f"tokens are not measured: {error}", LitCondWarning, stacklevel=2)

    def _measure_tokens(self, site: TokenSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        active = next((f for _, f in token_forwards(site.module)), None)
        reader = active or TokenForward(site, TokenRule(correction="identity", scale=1.0), torch.tensor(0.0))
        _, tokens = reader.find_tokens(args, kwargs)
        mask = reader.find_mask(args, kwargs, tokens)
        batch_axis = 0 if reader.batch_first else 1
        tokens = tokens.detach().narrow(batch_axis, 0, min(self.max_samples, tokens.shape[batch_axis]))
        mask = None if mask is None else mask[: self.max_samples]
        raw = _samples(reader.matrices(tokens), mask)
        if active is not None:
            if self.raw:
                self._note("cond_raw", "tokens", site.name, _mean([k for k, _ in spectra(raw)]))
            raw = _samples(reader.matrices(active.correct(tokens, mask)), mask)
        measured = spectra(raw)
        self._note("cond", "tokens", site.name, _mean([k for k, _ in measured]))
        self._spectra.setdefault("tokens", []).extend(s for _, s in measured)

    def _note(self, prefix: str, quantity: str, layer: str, value: float) -> None:
        if self._pending is not None:
            self._pending[f"{prefix}/{quantity}/{layer}"] = value

    def _summarise(self, trainer: Trainer, values: dict[str, float]) -> dict[str, float]:
        """Agree on the token values across processes and add the mean and the maximum over layers."""
        shared = [key for key in values if "/tokens/" in key]
        if trainer.world_size > 1 and shared:
            local = torch.tensor([values[k] for k in shared], device=trainer.strategy.root_device)
            reduced = trainer.strategy.reduce(local, reduce_op="mean")
            values = {**values, **dict(zip(shared, reduced.tolist(), strict=True))}
        result = dict(values)
        groups: dict[str, list[float]] = {}
        for key, value in values.items():
            groups.setdefault("/".join(key.split("/")[:2]), []).append(value)
        for group, members in groups.items():
            finite = [v for v in members if math.isfinite(v)]
            result[f"{group}/mean"] = sum(finite) / len(finite) if finite else math.inf
            result[f"{group}/max"] = max(finite) if finite else math.inf
            if len(finite) < len(members):
                result[f"{group}/nonfinite"] = float(len(members) - len(finite))
        return result

    def _log_metrics(self, pl_module: LightningModule, values: dict[str, float]) -> None:
        """Hand the values to callbacks and the progress bar; loggers get them with their own step."""
        for key, value in values.items():
            pl_module.log(
                key,
                value,
                on_step=True,
                on_epoch=False,
                logger=False,
                prog_bar=key == self.prog_bar,
                batch_size=1,
            )

    def _draw(self, trainer: Trainer, values: dict[str, float]) -> None:
        if not self.heatmap:
            return
        for key, value in values.items():
            prefix, quantity, layer = key.split("/", 2)
            if prefix == "cond" and layer not in ("mean", "max", "nonfinite"):
                self._maps.setdefault(quantity, HeatMap(quantity)).add(layer, self._measured_at, value)
        # A figure takes 0.1 s: draw the first ones and then ever more rarely; the last is drawn when training ends.
        count = max((m.columns for m in self._maps.values()), default=0)
        if count & (count - 1) == 0:
            self._log_maps(trainer)

    def _log_maps(self, trainer: Trainer) -> None:
        for quantity, heat_map in self._maps.items():
            log_figure(trainer, f"heatmap/{quantity}", heat_map, trainer.global_step)

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _release(self) -> None:
        self._remove_hooks()
        self._sites, self._token_sites, self._maps = [], [], {}
        self._pending, self._spectra = None, {}


class _TokenProbe:
    """Forward pre-hook of one measured step: shows the tokens to the monitor and changes nothing."""

    def __init__(self, monitor: ConditionNumberMonitor, site: TokenSite) -> None:
        self.monitor = monitor
        self.site = site

    @torch.no_grad()
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.monitor.note_tokens(self.site, args, kwargs)


def _samples(matrices: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Return one matrix for each sample, padding left out; samples without tokens are dropped."""
    if mask is None:
        return list(matrices)
    return [matrix[keep] for matrix, keep in zip(matrices, mask, strict=True) if keep.any()]


def _mean(values: list[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.inf
