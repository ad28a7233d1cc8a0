"""Invariant 7: the same losses bit for bit with and without the monitor, and nothing left behind."""

import gc
import math
import weakref

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lit_cond.callbacks import ConditionedTokens, ConditionNumberMonitor, SpectralConditioning
from lit_cond.errors import ConfigurationError, LitCondWarning
from tests.callbacks.test_monitor import Record
from tests.tiny import CLASSES, INPUTS, WIDTH, TinyModule, TinyTransformer, make_loader, make_module, make_trainer

OBSERVED = ("entropy/scores", "cond/scores", "cond/attention", "cond/jacobian", "cond/jacobian_bound", "cond/tokens")


class Encoder(nn.Module):
    """torch's own encoder, with dropout, of which the lower half is frozen and in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(INPUTS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.frozen = nn.TransformerEncoder(layer, 1).requires_grad_(False).eval()
        self.trained = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            x = self.frozen(self.embed(x))
        return self.head(self.trained(x).mean(1))


class Normalised(TinyTransformer):
    """Buffers that move in training, and dropout."""

    def __init__(self, attention="fused"):
        super().__init__(attention)
        self.normalise, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.2)

    def forward(self, x):
        return super().forward(self.drop(self.normalise(x)))


def compiled_inside(net):
    return torch.compile(net, backend="aot_eager")


def compiled_in_place(net):
    net.compile(backend="aot_eager")
    return net


def compiled_by_block(net):
    for block in net.blocks:
        block.compile(backend="aot_eager")
    return net


class Job(TinyModule):
    def __init__(self, make):
        super().__init__()
        self.net = make()


NETWORKS = {
    **{
        f"{name} attention": (lambda name=name: Normalised(name))
        for name in ("fused", "functional", "separate", "torch")
    },
    "checkpointing": lambda: TinyTransformer(checkpointing=True),
    "frozen encoder": Encoder,
    "compiled": lambda: compiled_inside(Normalised()),
    "compiled in place": lambda: compiled_in_place(Normalised()),
    "compiled block by block": lambda: compiled_by_block(Normalised()),
}
SETTINGS = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "clipping": {"gradient_clip_val": 0.1},
}


def run(tmp_path, make, monitors, conditioned=False, **settings):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Job(make)
    callbacks = [SpectralConditioning(), ConditionedTokens()] if conditioned else []
    logger = Record()
    trainer = make_trainer(tmp_path, [*callbacks, *monitors], max_epochs=2, logger=logger, **settings)
    trainer.fit(module, make_loader())
    return module, logger


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", NETWORKS)
def test_losses_are_the_same_bit_for_bit(tmp_path, name, setting):
    if name.startswith("compiled") and setting in ("clipping", "accumulation"):
        pytest.skip("compiling takes long; the two others stand for it")
    make, settings = NETWORKS[name], SETTINGS[setting]
    plain, _ = run(tmp_path, make, [], **settings)
    module, logger = run(
        tmp_path, make, [ConditionNumberMonitor(every_n_steps=2, intervals={"jacobian": 2})], **settings
    )
    assert module.losses == plain.losses
    assert len(set(module.losses)) > 2
    for (key, a), b in zip(plain.state_dict().items(), module.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    first = next(row for _, row in logger.rows if "cond/query/mean" in row)
    for key in OBSERVED:
        values = [
            v for k, v in first.items() if k.startswith(f"{key}/") and k.endswith(("attn", "mha", "blocks.0", "0"))
        ]
        assert values, (key, list(first))
        assert not any(math.isnan(v) for v in values), key


def test_losses_are_the_same_with_corrections(tmp_path):
    plain, _ = run(tmp_path, Normalised, [], conditioned=True)
    module, logger = run(tmp_path, Normalised, [ConditionNumberMonitor(every_n_steps=1)], conditioned=True)
    assert module.losses == plain.losses
    assert {"cond_raw/tokens/mean", "cond_raw/query/mean", "cond/jacobian/mean"} <= set(logger.rows[0][1])


def test_a_module_that_is_compiled_as_a_whole_shows_its_weights(tmp_path):
    def fit(monitors):
        torch._dynamo.reset()
        module = make_module()
        logger = Record()
        trainer = make_trainer(tmp_path, monitors, logger=logger)
        trainer.fit(torch.compile(module, backend="aot_eager"), make_loader())
        return module, logger

    plain, _ = fit([])
    with pytest.warns(LitCondWarning, match=r"as a whole is compiled; compile the network"):
        module, logger = fit([ConditionNumberMonitor(every_n_steps=2)])
    assert module.losses == plain.losses
    assert {"cond/query/mean", "cond/value/max"} <= set(logger.rows[0][1])
    assert not any(key.startswith(OBSERVED) for _, row in logger.rows for key in row)
    with pytest.raises(ConfigurationError, match=r"as a whole is compiled"):
        fit([ConditionNumberMonitor(quantities=["query", "entropy"])])


class Stop(Exception):
    pass


def traces(model):
    """Return what a probe could have left on a model."""
    found = []
    for name, module in model.named_modules():
        found += [f"{name}.forward"] if "forward" in module.__dict__ else []
        for table in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            found += [f"{name}.{table}"] * len(getattr(module, table))
    return found


@pytest.mark.parametrize("error", [None, Stop, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["before", "inside"])
def test_nothing_is_left_after_a_training_however_it_ends(tmp_path, error, where):
    """D9."""
    module = make_module()

    class Break(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 2 and error is not None and where == "before":
                raise error

    attention = module.net.blocks[1].attn

    watched = weakref.proxy(module)

    def project(x, kept=attention.project):
        if watched.trainer.global_step == 2 and error is not None and where == "inside":
            raise error
        return kept(x)

    attention.project = project
    trainer = make_trainer(tmp_path, [ConditionNumberMonitor(every_n_steps=1), Break()])
    if error is None:
        trainer.fit(module, make_loader())
    else:
        with pytest.raises((error, SystemExit)):
            trainer.fit(module, make_loader())
    assert not traces(module)
    assert (
        torch.overrides._get_current_function_mode() is None
        if hasattr(torch.overrides, "_get_current_function_mode")
        else True
    )
    del attention.project
    reference = weakref.ref(module.net)
    trainer.callbacks.clear()
    del trainer, module, attention, project, Break
    gc.collect()
    assert reference() is None


def test_memory_is_flat_over_three_hundred_steps(tmp_path):
    """D9: the number of tensors alive does not grow with steps."""
    counts = []

    class Count(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step in (100, 300):
                gc.collect()
                counts.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))

    monitor = ConditionNumberMonitor(every_n_steps=1, intervals={"jacobian": 5, "spectrum": 5}, heatmap=False)
    trainer = make_trainer(tmp_path, [monitor, Count()], max_epochs=-1, max_steps=300, limit_train_batches=4)
    trainer.fit(make_module(), make_loader(8, 2))
    assert len(counts) == 2
    assert counts[1] <= counts[0] + 5
