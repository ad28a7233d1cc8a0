"""What else goes wrong when a model is changed while others look at it (the traps that no other test has)."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.tuner import Tuner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import lit_cond
from lit_cond.callbacks import ConditionedTokens, ConditionNumberMonitor, SpectralConditioning, StrengthSchedule
from lit_cond.errors import CheckpointMismatchError
from lit_cond.surgery.weights import conditioned_weights, laid_out_like
from tests.tiny import TinyModule, TinyTransformer, largest_difference, make_loader, make_module, make_trainer, outputs


def fit(tmp_path, module, callbacks, **kwargs):
    trainer = make_trainer(tmp_path, callbacks, **kwargs)
    trainer.fit(module, make_loader(), make_loader())
    return trainer


@pytest.mark.parametrize("made", ["before", "after"])
def test_trap_7_an_average_kept_by_timm_inside_the_module(tmp_path, made):
    utils = pytest.importorskip("timm.utils")

    class WithAverage(TinyModule):
        def __init__(self):
            super().__init__()
            self.average = None

        def on_fit_start(self):
            if made == "after":
                self.average = utils.ModelEmaV3(self.net, decay=0.5)

        def on_train_batch_end(self, *args):
            self.average.update(self.net)

    torch.manual_seed(0)
    module = WithAverage()
    if made == "before":
        module.average = utils.ModelEmaV3(module.net, decay=0.5)
    fit(tmp_path, module, [SpectralConditioning()])
    averaged = module.average.module
    assert largest_difference(outputs(averaged), outputs(module.net)) > 0
    # The averaged copy computes with corrected weights too: all its matrices are well conditioned.
    for report in lit_cond.surgery.measure_weights(averaged):
        assert report.effective < 2.5


def test_trap_9_a_model_that_ran_compiled_before_fit(tmp_path):
    torch._dynamo.reset()
    plain, compiled = make_module(), make_module()
    compiled.net = torch.compile(compiled.net, backend="aot_eager")
    outputs(compiled)
    for module in (plain, compiled):
        fit(tmp_path, module, [SpectralConditioning(), ConditionedTokens()])
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-5)
    assert largest_difference(outputs(compiled), outputs(plain)) < 1e-5


@pytest.fixture(scope="module")
def mesh():
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_trap_12_a_correction_is_laid_out_like_the_sharded_weight(mesh, placement):
    whole, weight = torch.randn(7, 5), torch.randn(7, 5)
    sharded = laid_out_like(whole, distribute_tensor(weight, mesh, [placement]))
    assert sharded.placements == (placement,)
    assert torch.equal(sharded.full_tensor(), whole)


def test_trap_17_checkpoints_hold_nothing_that_needs_unpickling(tmp_path):
    callbacks = [
        SpectralConditioning(),
        ConditionedTokens(),
        ConditionNumberMonitor(every_n_steps=1),
        StrengthSchedule("measured", monitor="cond/key/mean", target=2.0, applies_to="weights"),
    ]
    fit(tmp_path, make_module(), callbacks).save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert set(checkpoint["lit_cond"]) == {"version", "weights", "tokens"}

    def leaves(value):
        if isinstance(value, dict):
            for key, inner in value.items():
                assert isinstance(key, str)
                yield from leaves(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from leaves(inner)
        else:
            yield value

    allowed = (torch.Tensor, str, float, int, bool, type(None))
    assert all(isinstance(leaf, allowed) for leaf in leaves(checkpoint["lit_cond"]))


def test_the_record_of_an_identity_is_small(tmp_path):
    fit(tmp_path, make_module(), [SpectralConditioning("identity", scale=0.5)]).save_checkpoint(tmp_path / "a.ckpt")
    entry = torch.load(tmp_path / "a.ckpt", weights_only=True)["lit_cond"]["weights"]["net.blocks.0.attn.qkv.weight"]
    assert entry["terms"][0]["correction"]["values"].shape == (96,)
    assert sum(t.nbytes for part in (entry["raw"], entry["terms"][0]["correction"]) for t in part.values()) < 900


def test_weights_only_checkpoints_carry_no_second_copy(tmp_path):
    trainer = fit(tmp_path, make_module(), [SpectralConditioning()])
    trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    entry = torch.load(tmp_path / "a.ckpt", weights_only=True)["lit_cond"]["weights"]["net.blocks.0.attn.qkv.weight"]
    assert list(entry) == ["terms"]
    assert list(entry["terms"][0]) == ["rule", "strength"]
    # Testing a live model from it works; only training can not go on.
    trainer.test(ckpt_path=str(tmp_path / "a.ckpt"), dataloaders=make_loader(), verbose=False)


def test_copies_share_the_correction_and_have_a_strength_of_their_own():
    model = TinyTransformer()
    lit_cond.condition_(model, lit_cond.WeightRule())
    twin = copy.deepcopy(model)
    lit_cond.surgery.set_strength_(twin, 0.0)
    (_, weight), (_, other) = next(conditioned_weights(model)), next(conditioned_weights(twin))
    assert weight.terms[0].correction is other.terms[0].correction
    assert float(weight.terms[0].strength) == 1.0
    assert lit_cond.surgery.strengths(twin) == [0.0, 0.0]


def test_a_plain_loop_with_the_functional_interface():
    torch.manual_seed(0)
    model = TinyTransformer()
    lit_cond.condition_(model, lit_cond.WeightRule())
    lit_cond.condition_(model, lit_cond.TokenRule())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        for x, y in make_loader():
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    assert sum(losses[-4:]) < sum(losses[:4])
    lit_cond.fold_(model)
    state = model.state_dict()
    assert "blocks.0.conditioned_tokens" in state


def test_a_checkpoint_that_leaves_out_a_corrected_weight_is_refused(tmp_path):
    class Partial(TinyModule):
        def state_dict(self, *args, **kwargs):
            state = super().state_dict(*args, **kwargs)
            del state["net.blocks.0.attn.qkv.weight"]
            return state

    trainer = fit(tmp_path, Partial(), [SpectralConditioning()])
    with pytest.raises(CheckpointMismatchError, match=r"net\.blocks\.0\.attn\.qkv\.weight.*is not in the state"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")


def test_a_fit_without_the_callback_trains_the_effective_weights(tmp_path):
    module = make_module()
    fit(tmp_path, module, [SpectralConditioning()])
    before = outputs(module)
    live = []

    class Look(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            live.extend(name for name, weight in conditioned_weights(pl_module) if not weight.baked)

    trainer = fit(tmp_path, module, [ConditionedTokens(strength=0.0), Look()])
    assert live == []
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = lit_cond.load_checkpoint(TinyModule, tmp_path / "a.ckpt")
    assert largest_difference(outputs(loaded), outputs(module)) == 0
    assert largest_difference(outputs(module), before) > 0


def test_the_learning_rate_finder_leaves_no_trace(tmp_path):
    module = make_module()
    raw = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer = make_trainer(tmp_path, [SpectralConditioning("identity", scale=0.5)], max_epochs=2)
    Tuner(trainer).lr_find(module, make_loader(), num_training=6, min_lr=1e-5, max_lr=1e-3)
    lit_cond.uncondition_(module)
    assert all(torch.equal(raw[name], p) for name, p in module.named_parameters())
