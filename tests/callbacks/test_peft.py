"""LoRA adapters of peft below and above the correction: training, checkpoints, merging."""

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lit_cond
from lit_cond.callbacks import ConditionedTokens, SpectralConditioning
from lit_cond.errors import CheckpointMismatchError
from lit_cond.surgery.weights import conditioned_weights
from tests.tiny import largest_difference, make_trainer

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

CALLBACKS = {"weights": SpectralConditioning, "tokens": ConditionedTokens}


def base():
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=5,
    )
    return transformers.ViTForImageClassification(config)


def with_adapters(model):
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def batches():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(32, 3, 16, 16, generator=generator)
    return DataLoader(TensorDataset(images, torch.randint(0, 5, (32,), generator=generator)), batch_size=8)


@torch.no_grad()
def logits(model):
    return model.eval()(next(iter(batches()))[0]).logits


class Module(pl.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]).logits, batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def fit(tmp_path, net, callbacks):
    module = Module(net)
    trainer = make_trainer(tmp_path, callbacks, max_epochs=2)
    trainer.fit(module, batches())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    return torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]


def adapters(model):
    return {name: value.clone() for name, value in model.state_dict().items() if "lora" in name}


def check_trained(tmp_path, net, callbacks, kind):
    """Train; the adapters learn, a plain model computes the same, and merging changes nothing."""
    before = adapters(net)
    state = fit(tmp_path, net, callbacks)
    computed = logits(net)
    assert all(not torch.equal(value, net.state_dict()[name]) for name, value in before.items() if "lora_B" in name)
    plain = Module(with_adapters(base()))
    if kind == "weights":
        plain.load_state_dict(state, strict=True)
        assert largest_difference(logits(plain.net), computed) == 0
    else:
        with pytest.raises(RuntimeError, match="conditioned_tokens"):
            plain.load_state_dict(state, strict=True)
    with pytest.raises(CheckpointMismatchError, match="adapters only" if kind == "weights" else "corrected"):
        net.save_pretrained(tmp_path / "adapters")
    merged = net.merge_and_unload()
    assert largest_difference(logits(merged), computed) < 1e-6
    if kind == "weights":
        merged.save_pretrained(tmp_path / "merged")
        loaded = transformers.ViTForImageClassification.from_pretrained(tmp_path / "merged")
        assert largest_difference(logits(loaded), logits(merged)) == 0


@pytest.mark.parametrize("kind", CALLBACKS)
def test_adapters_first_then_the_correction(tmp_path, kind):
    net = with_adapters(base())
    check_trained(tmp_path, net, [CALLBACKS[kind]()], kind)


@pytest.mark.parametrize("kind", CALLBACKS)
def test_a_conditioned_model_gets_adapters_afterwards(tmp_path, kind):
    model = base()
    make_trainer(tmp_path, [CALLBACKS[kind]()]).fit(Module(model), batches())
    computed = logits(model)
    net = with_adapters(model)
    assert largest_difference(logits(net), computed) == 0
    check_trained(tmp_path, net, [CALLBACKS[kind]()], kind)


@pytest.mark.parametrize("kind", CALLBACKS)
def test_adapters_merge_and_unmerge_under_a_live_correction(kind):
    model = base()
    lit_cond.condition_(model, CALLBACKS[kind]().rule)
    net = with_adapters(model)
    for name, parameter in net.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    computed = logits(net)
    net.merge_adapter()
    assert largest_difference(logits(net), computed) < 1e-6
    net.unmerge_adapter()
    assert largest_difference(logits(net), computed) < 1e-6
    merged = net.merge_and_unload()
    assert len(list(conditioned_weights(merged))) == (6 if kind == "weights" else 0)
    lit_cond.fold_(merged)
    assert largest_difference(logits(merged), computed) < 1e-6
