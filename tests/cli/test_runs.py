"""Finding the checkpoint of a run, and what is said of a folder that is none."""

import shutil

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_cond.errors import ConfigurationError, DataError
from lit_cond.runs import find_checkpoint, load_run
from tests.tiny import TinyModule, make_loader, outputs


def make_run(folder, **kwargs):
    """Train over three epochs whose monitored loss is best in the second."""
    losses = iter([3.0, 1.0, 2.0])

    class Rigged(TinyModule):
        def on_train_epoch_end(self):
            self.log("rigged", next(losses))

    checkpoint = ModelCheckpoint(folder / "checkpoints", "{epoch}", monitor="rigged", save_top_k=2, save_last=True)
    trainer = Trainer(
        max_epochs=3, callbacks=[checkpoint], logger=False, accelerator="cpu", enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    module = Rigged(**kwargs)
    trainer.fit(module, make_loader())
    config = {"model": {"class_path": "tests.tiny.TinyModule", "init_args": kwargs}, "data": None}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return module


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    make_run(folder)
    return folder


def test_best_and_last_are_found_in_a_moved_folder(run_folder, tmp_path):
    moved = shutil.copytree(run_folder, tmp_path / "moved")
    assert find_checkpoint(moved).name == "epoch=1.ckpt"
    assert find_checkpoint(moved).is_relative_to(moved)
    assert torch.load(find_checkpoint(moved, "last"), weights_only=True)["epoch"] == 2


def test_run_without_data_module(run_folder):
    run = load_run(run_folder, "last")
    assert run.datamodule is None
    expected = TinyModule.load_from_checkpoint(run.checkpoint)
    assert torch.equal(outputs(run.model), outputs(expected))
    assert not run.model.training


def test_checkpoint_by_path(run_folder):
    path = run_folder / "checkpoints" / "epoch=2.ckpt"
    assert load_run(run_folder, path).checkpoint == path


def test_model_without_saved_arguments_is_built_from_the_config(tmp_path):
    module = make_run(tmp_path, attention="separate")
    path = find_checkpoint(tmp_path, "last")
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["hyper_parameters"]
    torch.save(checkpoint, path)
    assert torch.equal(outputs(load_run(tmp_path, path).model), outputs(module))


def test_folder_without_config(tmp_path):
    with pytest.raises(DataError, match=r"holds no config\.yaml"):
        load_run(tmp_path)


def test_config_of_something_else(tmp_path):
    (tmp_path / "config.yaml").write_text("a: 1\n")
    with pytest.raises(DataError, match="names no model"):
        load_run(tmp_path)


def test_folder_without_checkpoint(tmp_path):
    with pytest.raises(DataError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)


def test_missing_checkpoint(tmp_path):
    with pytest.raises(DataError, match=r"no checkpoint '.*nowhere\.ckpt'"):
        find_checkpoint(tmp_path, "nowhere.ckpt")


@pytest.mark.parametrize(
    ("class_path", "message"),
    [("tests.tiny.TinyModul", "can not be imported: 'tests.tiny.TinyModul'"),
     ("torch.nn.Linear", "'torch.nn.Linear' is not a LightningModule"), (None, "can not be imported: None")],
)  # fmt: skip
def test_class_of_the_model_is_wrong(class_path, message, run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "copy")
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": {"class_path": class_path}}))
    with pytest.raises(ConfigurationError, match=message):
        load_run(folder)


def test_option_of_the_data_is_wrong(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "copy")
    data = {"class_path": "lit_cond.data.DigitsDataModule", "init_args": {"batchsize": 3}}
    config = {"model": {"class_path": "tests.tiny.TinyModule"}, "data": data}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigurationError, match=r"has no option 'batchsize'; did you mean 'batch_size'\?"):
        load_run(folder)
