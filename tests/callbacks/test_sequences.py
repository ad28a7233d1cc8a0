"""Sequences of a real user's day: averages saved late, callbacks used again, fits that fail, several optimizers."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

import lit_cond
from lit_cond.callbacks import ConditionedTokens, ConditionNumberMonitor, SpectralConditioning, StrengthSchedule
from lit_cond.errors import CheckpointMismatchError, LitCondWarning, NoMatchingTargetError
from lit_cond.surgery import strengths
from lit_cond.surgery.weights import conditioned_weights
from tests.tiny import TinyModule, largest_difference, make_loader, make_module, make_trainer, outputs


def fit(tmp_path, module, callbacks, **kwargs):
    trainer = make_trainer(tmp_path, callbacks, **kwargs)
    trainer.fit(module, make_loader(), make_loader())
    return trainer


class Fail(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            raise RuntimeError("stop here")


def test_an_average_saved_after_fit_resumes_from_raw_weights(tmp_path):
    def callbacks():
        return [SpectralConditioning("identity", scale=0.5), EMAWeightAveraging(decay=0.5)]

    module = make_module(lr=0.0)
    raw = module.net.blocks[0].attn.qkv.weight.detach().clone()
    fit(tmp_path, module, callbacks()).save_checkpoint(tmp_path / "late.ckpt")
    other = make_module(seed=2, lr=0.0)
    make_trainer(tmp_path, callbacks(), max_epochs=2).fit(
        other, make_loader(), make_loader(), ckpt_path=tmp_path / "late.ckpt"
    )
    offset = other.net.blocks[0].attn.qkv.weight.detach() - raw
    assert torch.allclose(offset, 0.5 * torch.eye(32).repeat(3, 1), atol=1e-6)


@pytest.mark.parametrize("first", [True, False])
def test_an_average_is_saved_on_an_exception(tmp_path, first):
    pair = [SpectralConditioning(), EMAWeightAveraging(decay=0.5)]
    saver = ModelCheckpoint(tmp_path, save_on_exception=True, every_n_epochs=100)
    with pytest.raises(RuntimeError, match="stop here"):
        fit(tmp_path, make_module(), [*(pair if first else pair[::-1]), saver, Fail()], enable_checkpointing=True)
    (path,) = tmp_path.glob("*.ckpt")
    state = torch.load(path, weights_only=True)
    plain = TinyModule()
    plain.load_state_dict(state["state_dict"], strict=True)
    for report in lit_cond.surgery.measure_weights(plain):
        assert report.effective < 2.5
    current = TinyModule()
    current.load_state_dict(state["current_model_state"], strict=True)
    assert max(r.effective for r in lit_cond.surgery.measure_weights(current)) > 10  # raw, to train on


def test_an_average_of_corrected_tokens_is_saved_with_the_strength_in_force(tmp_path):
    saver = ModelCheckpoint(tmp_path, save_last=True)
    callbacks = [ConditionedTokens(), StrengthSchedule("constant", end=0.3), EMAWeightAveraging(decay=0.5), saver]
    module = make_module()
    fit(tmp_path, module, callbacks, enable_checkpointing=True)
    loaded = lit_cond.load_checkpoint(TinyModule, saver.last_model_path)
    assert strengths(loaded) == pytest.approx([0.3])
    assert largest_difference(outputs(loaded), outputs(module)) == 0


def test_a_renamed_state_dict_is_refused_until_the_record_is_renamed_too(tmp_path):
    fit(tmp_path, make_module(), [SpectralConditioning()]).save_checkpoint(tmp_path / "a.ckpt")

    class Renamed(TinyModule):
        both = False

        def __init__(self):
            super().__init__()
            self.network = self.net
            del self.net

        def forward(self, x):
            return self.network(x)

        def on_load_checkpoint(self, checkpoint):
            def rename(entries):
                return {key.replace("net.", "network.", 1): value for key, value in entries.items()}

            checkpoint["state_dict"] = rename(checkpoint["state_dict"])
            if self.both:
                checkpoint["lit_cond"]["weights"] = rename(checkpoint["lit_cond"]["weights"])

    trainer = make_trainer(tmp_path, [SpectralConditioning()], max_epochs=2)
    with pytest.raises(CheckpointMismatchError, match=r"'net\.blocks\.0\.attn\.qkv\.weight', which is no parameter"):
        trainer.fit(Renamed(), make_loader(), ckpt_path=tmp_path / "a.ckpt")
    Renamed.both = True
    make_trainer(tmp_path, [SpectralConditioning()], max_epochs=2).fit(
        Renamed(), make_loader(), ckpt_path=tmp_path / "a.ckpt"
    )


def test_a_second_fit_uses_the_settings_of_its_own_callback(tmp_path):
    module = make_module()
    fit(tmp_path, module, [SpectralConditioning(strength=0.5), ConditionedTokens(strength=0.5)])
    kappas = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            kappas.append(max(r.effective for r in lit_cond.surgery.measure_weights(pl_module)))

    with pytest.warns(LitCondWarning, match=r"was at strength 0\.5 and goes on with 1"):
        fit(tmp_path, module, [SpectralConditioning(refresh_every_n_steps=1), ConditionedTokens(), Look()])
    assert set(strengths(module)) == {1.0}
    assert max(kappas[1:]) < 2.2


def test_one_callback_object_serves_several_runs(tmp_path):
    callbacks = [
        SpectralConditioning(refresh_every_n_steps=3),
        ConditionNumberMonitor(every_n_steps=50),
        StrengthSchedule("measured", 0.5, every_n_steps=1, monitor="cond/query/mean", target=3.0),
    ]
    runs = []
    for _ in range(2):
        module = make_module()
        saver = ModelCheckpoint(tmp_path, monitor="cond/query/mean")
        fit(tmp_path, module, [*callbacks, saver], enable_checkpointing=True)
        runs.append(module.losses)
    assert runs[0] == runs[1]


def test_a_fit_that_never_began_leaves_the_model_as_it_was(tmp_path):
    module = make_module()
    before = outputs(module)
    with pytest.raises(NoMatchingTargetError):
        fit(tmp_path, module, [SpectralConditioning(), ConditionedTokens(include=["typo"])])
    assert largest_difference(outputs(module), before) == 0
    assert not list(conditioned_weights(module))

    class Early(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            raise RuntimeError("before the first step")

    with pytest.raises(RuntimeError, match="before the first step"):
        fit(tmp_path, module, [SpectralConditioning(), ConditionedTokens(), Early()])
    assert largest_difference(outputs(module), before) == 0
    assert "net.blocks.0.conditioned_tokens" not in module.state_dict()


def test_intervals_with_two_optimizers(tmp_path):
    class Two(TinyModule):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self):
            return [
                torch.optim.SGD(self.net.blocks.parameters(), lr=1e-2),
                torch.optim.SGD(self.net.head.parameters(), lr=1e-2),
            ]

    measured = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            measured.append(monitor._measured_at["query"])

    torch.manual_seed(0)
    monitor = ConditionNumberMonitor(every_n_steps=3)
    fit(tmp_path, Two(), [monitor, Look()], max_epochs=2)
    # Two steps for each batch: 0, 2, 4, ..., so the intervals of three steps begin at 0, 4, 6, 10 and 12.
    assert sorted(set(measured)) == [0, 4, 6, 10, 12]


def test_a_compiled_network_with_corrected_tokens_is_monitored(tmp_path):
    torch._dynamo.reset()
    module = make_module()
    module.net = torch.compile(module.net, backend="eager")
    trainer = fit(tmp_path, module, [ConditionedTokens(), ConditionNumberMonitor(every_n_steps=1)])
    assert float(trainer.callback_metrics["cond/tokens/mean"]) < 2.1


def test_two_networks_that_share_an_ending_of_their_names(tmp_path):
    class Pair(TinyModule):
        def __init__(self):
            super().__init__()
            self.teacher = torch.nn.ModuleDict({"net": TinyModule().net})

    torch.manual_seed(0)
    module = Pair()
    fit(tmp_path, module, [ConditionedTokens()]).save_checkpoint(tmp_path / "a.ckpt")
    loaded = lit_cond.load_checkpoint(Pair, tmp_path / "a.ckpt")
    assert largest_difference(outputs(loaded), outputs(module)) == 0


def test_an_evaluation_that_fails_leaves_the_trained_model_alone(tmp_path):
    class Broken(TinyModule):
        def test_step(self, batch, batch_idx):
            raise RuntimeError("stop here")

    torch.manual_seed(0)
    module = Broken()
    callbacks = [SpectralConditioning(), ConditionedTokens()]
    fit(tmp_path, module, callbacks)
    before = outputs(module)
    with pytest.raises(RuntimeError, match="stop here"):
        make_trainer(tmp_path, callbacks).test(module, make_loader())
    assert largest_difference(outputs(module), before) == 0
    assert "net.blocks.0.conditioned_tokens" in module.state_dict()


@pytest.mark.parametrize("strength", [0.1, 0.3])
def test_a_strength_that_float32_rounds_is_no_change_of_strength(tmp_path, strength):
    module = make_module()
    for _ in range(2):  # a warning of lit_cond would fail the test
        fit(tmp_path, module, [SpectralConditioning(strength=strength), ConditionedTokens(strength=strength)])
    assert strengths(module) == pytest.approx([strength] * 3)


def test_a_run_that_diverged_is_saved_after_fit_with_its_nan(tmp_path):
    class Diverging(TinyModule):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * float("nan")

    trainer = fit(tmp_path, Diverging(), [SpectralConditioning()])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    plain = TinyModule.load_from_checkpoint(tmp_path / "a.ckpt")
    assert plain.net.blocks[0].attn.qkv.weight.isnan().all()
