import math

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import nn

from lit_cond.errors import ConfigurationError
from lit_cond.tasks import Task, build_backbone
from lit_cond.tasks.optim import split_by_decay, warmup_cosine


class OneLinear(Task):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.layer = nn.Linear(8 * 8, 3)
        self.rates = []

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.layer(images.flatten(1)), labels)

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])


def names_without_decay(model):
    _, spared = split_by_decay(model)
    ids = {id(parameter) for parameter in spared}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


def test_a_decay_group_holds_matrices_and_convolutions_only():
    backbone = build_backbone(
        "timm/vit_tiny_patch16_224", 3, img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2
    )
    decay, spared = split_by_decay(backbone)
    named = names_without_decay(backbone)
    assert len(decay) + len(spared) == len(list(backbone.parameters()))
    assert {"cls_token", "pos_embed", "norm.weight", "blocks.0.attn.qkv.bias"} <= named
    assert [p.shape for p in decay] == [
        (16, 3, 4, 4),
        (48, 16),
        (16, 16),
        (64, 16),
        (16, 64),
        (3, 16),
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "spared"),
    [
        (
            "torchvision/VisionTransformer",
            {"image_size": 8, "patch_size": 4, "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 8},
            {"class_token", "encoder.pos_embedding"},
        ),
        (
            "hf/vit",
            {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
            {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"},
        ),
        (
            "timm/swin_tiny_patch4_window7_224",
            {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (1,), "num_heads": (2,)},
            {"layers.0.blocks.0.attn.relative_position_bias_table"},
        ),
        (
            "timm/xcit_nano_12_p16_224",
            {"img_size": 32, "embed_dim": 16, "depth": 1, "num_heads": 2},
            {"cls_token", "blocks.0.attn.temperature"},
        ),
    ],
)
def test_positions_tokens_and_scales_of_several_dimensions_do_not_decay(name, arguments, spared):
    model = build_backbone(name, 3, **arguments)
    of_several_dimensions = {
        key for key, value in model.named_parameters() if value.ndim > 1 and key in names_without_decay(model)
    }
    assert of_several_dimensions == spared


def test_norms_shared_and_frozen_parameters():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.second = nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.norm = nn.LayerNorm((2, 2))
            self.scale = nn.Parameter(torch.ones(2, 2))

        def no_weight_decay(self):
            return {"scale"}

    model = Model()
    decay, spared = split_by_decay(model)
    assert [id(p) for p in decay] == [id(model.first.weight)]
    assert {id(p) for p in spared} == {id(model.norm.weight), id(model.norm.bias), id(model.scale)}


def test_each_trainable_parameter_is_in_exactly_one_group(make_task):
    task = make_task()
    task.backbone.patch_embed.requires_grad_(False)
    groups = task.parameter_groups(0.3)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in task.parameters() if p.requires_grad)
    assert {group["name"]: group["weight_decay"] for group in groups} == {"decay": 0.3, "no_decay": 0.0}


def test_an_empty_group_is_left_out():
    task = OneLinear()
    task.layer.weight.requires_grad_(False)
    assert [group["name"] for group in task.parameter_groups(0.1)] == ["no_decay"]


def test_warmup_cosine_by_hand():
    # 4 steps of warm-up, 8 of cosine from 1 to 0.2: at half of it 0.6, at a quarter 0.2 + 0.4 (1 + sqrt(1/2)).
    expected = {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0, 6: 0.6 + 0.4 * math.sqrt(0.5), 8: 0.6, 12: 0.2, 50: 0.2}
    assert {step: warmup_cosine(step, 4, 12, 0.2) for step in expected} == pytest.approx(expected)


def test_warmup_longer_than_the_run_only_rises():
    assert [warmup_cosine(step, 10, 4) for step in range(4)] == [0.1, 0.2, 0.3, 0.4]


def test_no_warmup_starts_at_the_peak():
    assert warmup_cosine(0, 0, 10) == 1.0


@pytest.mark.parametrize(
    ("options", "trainer_options", "peak_factors"),
    [
        # 3 batches per epoch, 2 epochs: 6 steps.
        ({}, {}, [1, 0.5 + math.sqrt(3) / 4, 0.75, 0.5, 0.25, 0.5 - math.sqrt(3) / 4]),
        ({"warmup_epochs": 1.0}, {}, [1 / 3, 2 / 3, 1, 1, 0.75, 0.25]),
        ({"warmup_steps": 2}, {}, [0.5, 1, 1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]),
        # Accumulation over 2 batches: 2 steps per epoch.
        ({"warmup_epochs": 1.0}, {"accumulate_grad_batches": 2}, [0.5, 1, 1, 0.5]),
        ({"warmup_epochs": 0.5}, {"accumulate_grad_batches": 2}, [1, 1, 0.75, 0.25]),
        ({"warmup_epochs": 1.0}, {"max_epochs": -1, "max_steps": 4}, [1 / 3, 2 / 3, 1, 1]),
    ],
)
def test_the_rate_of_every_step(make_trainer, make_loader, options, trainer_options, peak_factors):
    task = OneLinear(lr=0.1, **options)
    make_trainer(**({"max_epochs": 2} | trainer_options)).fit(task, make_loader())
    assert task.rates == pytest.approx([0.1 * factor for factor in peak_factors])


def test_the_rate_ends_at_min_lr(make_trainer, make_loader):
    task = OneLinear(lr=0.1, min_lr=0.01)
    trainer = make_trainer(max_epochs=2)
    trainer.fit(task, make_loader())
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)


def test_learning_rate_monitor_names_the_groups(make_trainer, make_loader):
    trainer = make_trainer(logger=True, callbacks=[LearningRateMonitor()], log_every_n_steps=1)
    trainer.fit(OneLinear(), make_loader())
    assert {"lr/decay", "lr/no_decay"} <= trainer.logged_metrics.keys() | trainer.callback_metrics.keys()


def test_a_run_without_an_end_is_refused(make_trainer, make_loader):
    with pytest.raises(ConfigurationError, match="max_epochs and max_steps of the trainer are both -1: set one"):
        make_trainer(max_epochs=-1).fit(OneLinear(), make_loader())


def test_warmup_in_epochs_needs_an_epoch(make_trainer):
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield torch.zeros(1, 8, 8), 0

    loader = torch.utils.data.DataLoader(Endless(), batch_size=4)
    trainer = make_trainer(max_epochs=-1, max_steps=4)
    with pytest.raises(ConfigurationError, match=r"warmup_epochs is 1.0 and the training data has no length: give"):
        trainer.fit(OneLinear(warmup_epochs=1.0), loader)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.0}, "lr is 0.0: give a learning rate above 0"),
        ({"lr": math.nan}, "lr is nan: give a learning rate above 0"),
        ({"min_lr": 0.2, "lr": 0.1}, "min_lr is 0.2: give a value from 0 to lr, which is 0.1"),
        ({"min_lr": -0.2}, "min_lr is -0.2: give a value from 0 to lr"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0: give 0 or more"),
        ({"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\): give two values"),
        ({"warmup_epochs": -1.0}, "warmup_epochs is -1.0 and warmup_steps None: a length is 0 or more"),
        ({"warmup_epochs": 1.0, "warmup_steps": 3}, "warmup_epochs is 1.0 and warmup_steps 3: give only one"),
    ],
)
def test_values_out_of_range(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        Task(**arguments)
