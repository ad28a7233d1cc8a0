import math
import warnings

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_cond.data import DigitsDataModule
from lit_cond.errors import ConfigurationError
from lit_cond.tasks import ImageClassification

HF_VIT = {
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


class Constant(nn.Module):
    """Returns the same logits for every image; its parameter keeps the optimizer busy."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, images):
        return self.logits.expand(len(images), -1)


def test_a_few_steps_on_digits_lower_the_loss(make_task, make_trainer):
    seed_everything(0, verbose=False)
    task = make_task(num_classes=10, lr=3e-3)
    data = DigitsDataModule(batch_size=64)
    trainer = make_trainer(max_epochs=3)
    before = trainer.validate(task, data, verbose=False)[0]
    trainer.fit(task, data)
    after = trainer.validate(task, data, verbose=False)[0]
    assert before["val/loss"] == pytest.approx(math.log(10), abs=0.6)
    assert after["val/loss"] < 0.9 * before["val/loss"]
    assert after["val/acc"] > 2 * before["val/acc"]


def test_two_runs_with_one_seed_are_equal(make_task, make_trainer):
    def losses():
        seed_everything(3, verbose=False)
        task = make_task(num_classes=10, mixup_alpha=0.2, cutmix_alpha=1.0)
        trainer = make_trainer(max_steps=5, limit_val_batches=0)
        trainer.fit(task, DigitsDataModule(augment=True))
        return trainer.callback_metrics["train/loss"], torch.cat([p.flatten() for p in task.parameters()])

    (first_loss, first), (second_loss, second) = losses(), losses()
    assert first_loss == second_loss
    assert torch.equal(first, second)


def test_logged_keys_and_values(make_trainer, make_loader, tmp_path):
    logits = [0.0, 0.1, 0.2, 0.3, 0.4, 2.0, 0.5]
    task = ImageClassification(7, Constant(logits), lr=1e-9)
    # Labels 0..6 twice: the top prediction is always class 5, the five best leave out classes 0 and 1.
    trainer = make_trainer(logger=CSVLogger(tmp_path), log_every_n_steps=1)
    trainer.fit(task, make_loader(14, 4, 7), make_loader(14, 4, 7))
    keys = {"train/loss", "train/acc", "val/loss", "val/acc", "val/acc_top5", "val/calibration_error"}
    assert keys == set(trainer.callback_metrics)
    confidence = torch.tensor(logits).softmax(0).max().item()
    expected = {
        "val/loss": F.cross_entropy(torch.tensor(logits).expand(7, -1), torch.arange(7)).item(),
        "val/acc": 1 / 7,
        "val/acc_top5": 5 / 7,
        "val/calibration_error": confidence - 1 / 7,
        "train/acc": 1 / 7,
    }
    got = {key: trainer.callback_metrics[key].item() for key in expected}
    assert got == pytest.approx(expected, abs=1e-6)  # the last, smaller batch counts by its size
    assert {"train/loss", "train/acc", "val/acc"} <= set(trainer.progress_bar_metrics)

    tested = trainer.test(task, make_loader(14, 4, 7), verbose=False)[0]
    assert tested == pytest.approx(
        {key.replace("val/", "test/"): value for key, value in expected.items() if key.startswith("val/")}, abs=1e-6
    )


def test_no_top5_below_six_classes(make_task, make_trainer, make_loader):
    trainer = make_trainer()
    trainer.validate(make_task(), make_loader(), verbose=False)
    assert set(trainer.callback_metrics) == {"val/loss", "val/acc", "val/calibration_error"}


def test_no_warning_but_for_workers(make_task, make_trainer, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(
            logger=TensorBoardLogger(tmp_path),
            enable_checkpointing=True,
            log_every_n_steps=1,
            limit_train_batches=2,
        )
        trainer.fit(make_task(num_classes=10), DigitsDataModule())
        trainer.test(ckpt_path="best", datamodule=DigitsDataModule(), verbose=False)
    # Loading tiny images in the main process is meant, and Lightning warns about it on machines with many cores.
    texts = [str(warning.message) for warning in caught]
    assert [text for text in texts if "does not have many workers" not in text and "LeafSpec" not in text] == []


def test_label_smoothing_by_hand(make_trainer, make_loader):
    logits = [1.0, 2.0, 4.0]
    task = ImageClassification(3, Constant(logits), label_smoothing=0.3, lr=1e-9)
    trainer = make_trainer(max_steps=1)
    trainer.fit(task, make_loader(3, 3))
    log_p = torch.tensor(logits).log_softmax(0)
    # Labels 0, 1, 2 once each: the mean target is uniform whatever the smoothing.
    assert trainer.callback_metrics["train/loss"].item() == pytest.approx(-log_p.mean().item(), abs=1e-6)
    trainer = make_trainer(max_steps=1)
    trainer.fit(task, make_loader(3, 3, 1))
    smoothed = -(0.7 * log_p[0] + 0.3 * log_p.mean()).item()
    assert trainer.callback_metrics["train/loss"].item() == pytest.approx(smoothed, abs=1e-6)


@pytest.mark.parametrize("alphas", [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixed_batches_have_soft_targets_of_the_right_shares(make_task, alphas):
    torch.manual_seed(0)
    task = make_task(mixup_alpha=alphas[0], cutmix_alpha=alphas[1])
    # Every pixel holds the class of its image, so shares of pixels (or of brightness) are shares of the target.
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    images = labels.float().view(6, 1, 1, 1).expand(6, 1, 8, 8).contiguous()
    changed = 0
    for _ in range(20):
        mixed, targets = task.mixing(images, labels)
        assert targets.shape == (6, 3)
        torch.testing.assert_close(targets.sum(1), torch.ones(6))
        expected = targets @ torch.arange(3.0)
        torch.testing.assert_close(mixed.mean(dim=(1, 2, 3)), expected, atol=1e-5, rtol=0)
        changed += int(not torch.equal(targets, F.one_hot(labels, 3).float()))
    assert changed > 10


def test_training_with_mixed_targets(make_task, make_trainer, make_loader):
    trainer = make_trainer()
    trainer.fit(make_task(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1), make_loader())
    assert trainer.callback_metrics["train/loss"].isfinite()
    assert 0 <= trainer.callback_metrics["train/acc"] <= 1


def test_without_mixing_there_is_no_mixer(make_task):
    assert make_task().mixing is None


def test_arguments_survive_the_checkpoint_and_load_without_any(make_task, make_trainer, make_loader, tmp_path):
    task = make_task(lr=0.02, betas=(0.8, 0.95), label_smoothing=0.1, warmup_steps=1)
    trainer = make_trainer(enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path, filename="last")])
    trainer.fit(task, make_loader())
    loaded = ImageClassification.load_from_checkpoint(tmp_path / "last.ckpt")
    assert dict(loaded.hparams) == dict(task.hparams) | {"pretrained": False}
    assert (loaded.lr, loaded.betas, loaded.label_smoothing) == (0.02, (0.8, 0.95), 0.1)
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(loaded.eval()(images), task.eval()(images))


def test_a_checkpoint_holds_the_weights_of_the_backbone_and_nothing_else(
    make_task, make_trainer, make_loader, tmp_path
):
    task = make_task(mixup_alpha=0.1)
    trainer = make_trainer()
    trainer.fit(task, make_loader(), make_loader())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    state = torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"]
    assert set(state) == {f"backbone.{name}" for name in task.backbone.state_dict()}


def test_a_checkpoint_of_a_pretrained_model_loads_without_fetching_weights(
    make_trainer, make_loader, tmp_path, monkeypatch
):
    from torchvision import models

    trained = models.mobilenet_v3_small(num_classes=1000).state_dict()
    fetched = []
    monkeypatch.setattr(
        models.MobileNet_V3_Small_Weights, "get_state_dict", lambda self, **kwargs: fetched.append(1) or trained
    )
    task = ImageClassification(3, "torchvision/mobilenet_v3_small", pretrained=True)
    assert fetched == [1]
    trainer = make_trainer()
    trainer.strategy.connect(task)
    trainer.save_checkpoint(tmp_path / "start.ckpt")
    loaded = ImageClassification.load_from_checkpoint(tmp_path / "start.ckpt")
    assert fetched == [1]
    assert torch.equal(loaded.backbone.classifier[0].weight, trained["classifier.0.weight"])
    assert task.hparams["pretrained"] is True


def test_a_module_is_not_put_into_the_arguments(make_trainer, make_loader, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task = ImageClassification(3, Constant([0.0, 1.0, 2.0]))
    assert "backbone" not in task.hparams
    trainer = make_trainer(max_steps=1)
    trainer.fit(task, make_loader())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    loaded = ImageClassification.load_from_checkpoint(tmp_path / "end.ckpt", backbone=Constant([0.0, 0.0, 0.0]))
    assert torch.equal(loaded.backbone.logits, task.backbone.logits)


@pytest.mark.parametrize(
    ("backbone", "backbone_args", "channels"),
    [
        ("hf/vit", HF_VIT, 1),
        (
            "torchvision/VisionTransformer",
            {"image_size": 8, "patch_size": 4, "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24},
            3,
        ),
    ],
)
def test_other_libraries_train_and_load(make_trainer, tmp_path, backbone, backbone_args, channels):
    task = ImageClassification(10, backbone, backbone_args)
    trainer = make_trainer(max_steps=2, limit_val_batches=1)
    data = DigitsDataModule(channels=channels)
    trainer.fit(task, data)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    loaded = ImageClassification.load_from_checkpoint(tmp_path / "end.ckpt")
    images = next(iter(data.val_dataloader()))[0]
    assert torch.equal(loaded.eval()(images), task.eval()(images))


def test_prediction_with_and_without_labels(make_task, make_trainer, make_loader):
    task = make_task()
    with_labels = make_trainer().predict(task, make_loader())
    images = torch.cat([batch[0] for batch in make_loader()])
    without = make_trainer().predict(task, DataLoader(images, batch_size=4))
    for first, second in zip(with_labels, without, strict=True):
        assert first.keys() == second.keys() == {"logits", "labels"}
        assert torch.equal(first["logits"], second["logits"])
        assert torch.equal(first["labels"], first["logits"].argmax(1))


def test_two_processes_log_what_one_does(make_task, make_trainer, tmp_path):
    task = make_task(num_classes=10)
    data = DigitsDataModule(batch_size=25)  # 200 images: equal halves of whole batches

    def validated(**options):
        # With a logger that takes figures, so that the confusion matrix is gathered and drawn as well.
        trainer = make_trainer(logger=TensorBoardLogger(tmp_path), **options)
        trainer.validate(task, data, verbose=False)
        return {key: value.item() for key, value in trainer.callback_metrics.items()}

    assert validated(devices=2, strategy="ddp_fork") == pytest.approx(validated(), abs=1e-6)


def figures(folder):
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    return {tag: [event.step for event in events.Images(tag)] for tag in events.Tags()["images"]}


def test_the_confusion_matrix_is_drawn_after_each_evaluation(make_task, make_trainer, make_loader, tmp_path):
    logger = TensorBoardLogger(tmp_path)
    trainer = make_trainer(max_epochs=2, logger=[CSVLogger(tmp_path), logger])
    task = make_task()
    trainer.fit(task, make_loader(), make_loader())
    trainer.test(task, make_loader(), verbose=False)
    logger.experiment.flush()
    # Three batches per epoch; the sanity check draws nothing.
    assert figures(logger.log_dir) == {"val/confusion": [3, 6], "test/confusion": [6]}


def test_the_confusion_matrix_can_be_turned_off(make_task, make_trainer, make_loader, tmp_path):
    logger = TensorBoardLogger(tmp_path)
    make_trainer(logger=logger).fit(make_task(confusion_matrix=False), make_loader(), make_loader())
    logger.experiment.flush()
    assert figures(logger.log_dir) == {}


def test_a_backbone_with_another_width_is_refused(make_trainer, make_loader):
    with pytest.raises(ConfigurationError, match=r"logits of shape \(4, 2\): expected \(batch, 3\)"):
        make_trainer().fit(ImageClassification(3, Constant([0.0, 1.0])), make_loader())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0: give at least 0 and less than 1"),
        ({"mixup_alpha": -0.1}, "mixup_alpha is -0.1: give 0 for off, or a positive value"),
        ({"cutmix_alpha": -1.0}, "cutmix_alpha is -1.0: give 0 for off, or a positive value"),
    ],
)
def test_values_out_of_range(make_task, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        make_task(**arguments)


def test_c7_another_optimizer_can_take_its_place(make_task, make_loader, tmp_path):
    """The hook that LightningCLI's --optimizer overrides is the only place that builds one."""
    from lightning.pytorch.cli import LightningCLI

    cli = LightningCLI(
        ImageClassification,
        trainer_class=Trainer,
        args=["--model.num_classes=3", "--optimizer=SGD", "--optimizer.lr=0.1", "--trainer.accelerator=cpu"],
        run=False,
        save_config_callback=None,
    )
    assert type(cli.model).__name__ == "ImageClassification"
    configured = cli.model.configure_optimizers()
    assert isinstance(configured, torch.optim.SGD)
