"""The shipped configurations: each is parsed by the real command line, and its model is built."""

from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from lit_cond import cli
from lit_cond.surgery.find import find_attention
from lit_cond.tasks import ImageClassification

FOLDER = Path(__file__).parents[2] / "configs" / "image_classification"
# Layers with attention, and parameters in millions as published for 1,000 classes.
IMAGENET = {
    "vit_b": (12, 86.6),
    "deit_b": (12, 86.6),
    "swin_b": (24, 87.8),
    "xcit_m": (26, 84.4),
    "davit_b": (24, 88.0),
}


def parsed(name, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["fit", "--config", str(FOLDER / f"{name}.yaml"), "--print_config"])
    assert not done.value.code
    return yaml.safe_load(capsys.readouterr().out)


def test_each_configuration_is_tested_here():
    names = {path.stem for path in FOLDER.glob("*.yaml")}
    assert names == {"digits_vit", *(f"imagenet_{key}" for key in IMAGENET)}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_first_lines_say_how_to_run_it(path):
    head = path.read_text().split("\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in head)
    assert any(f"python -m lit_cond fit --config configs/image_classification/{path.name}" in line for line in head)


@pytest.mark.parametrize("key", IMAGENET)
def test_imagenet_models_are_parsed_and_built(key, capsys):
    layers, millions = IMAGENET[key]
    options = parsed(f"imagenet_{key}", capsys)
    arguments = options["model"]["init_args"]
    arguments.pop("num_classes", None)
    with torch.device("meta"):
        task = ImageClassification(1000, **arguments)
    parameters = sum(parameter.numel() for parameter in task.parameters())
    assert parameters / 1e6 == pytest.approx(millions, abs=0.2)
    assert len(find_attention(task.backbone)) == layers
    callbacks = [callback["class_path"].rpartition(".")[2] for callback in options["trainer"]["callbacks"]]
    assert callbacks == ["ModelCheckpoint", "ModelCheckpoint", "LearningRateMonitor", "EMAWeightAveraging"]
    assert options["trainer"]["precision"] == "bf16-mixed"
    assert options["trainer"]["gradient_clip_val"] > 0
    assert options["conditioning"]["init_args"]["correction"] == "spectral"
    rate = arguments["backbone_args"]["drop_path_rate"]
    rates = [module.drop_prob for module in task.modules() if type(module).__name__ == "DropPath"]
    assert max(rates) == pytest.approx(rate)


def test_the_imagenet_job_runs_on_a_small_tree(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lit_cond"])
    for split in ("train", "val"):
        for name, colour in (("ant", (200, 0, 0)), ("bee", (0, 200, 0)), ("cat", (0, 0, 200))):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            for index in range(4):
                Image.new("RGB", (40, 36), colour).save(tmp_path / "images" / split / name / f"{index}.png")
    backbone = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 2, "drop_path_rate": 0.1}
    words = {
        "data.root": "images",
        "data.image_size": "32",
        "data.batch_size": "6",
        "data.num_workers": "0",
        "model.backbone_args": yaml.safe_dump(backbone, default_flow_style=True).strip(),
        "trainer.accelerator": "cpu",
        "trainer.devices": "1",
        "trainer.strategy": "auto",
        "trainer.max_epochs": "2",
        "trainer.enable_progress_bar": "false",
    }
    config = str(FOLDER / "imagenet_vit_b.yaml")
    cli.main(["fit", "--config", config, *(word for key, value in words.items() for word in (f"--{key}", value))])
    saved = list((tmp_path / "runs" / "imagenet_vit_b").rglob("*.ckpt"))
    assert {path.name for path in saved} >= {"last.ckpt"}
    task = ImageClassification.load_from_checkpoint(saved[0])
    assert task.num_classes == 3
    assert task.hparams["num_classes"] == 3


@pytest.mark.slow
def test_the_digits_job_reaches_its_accuracy(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lit_cond"])
    config = str(FOLDER / "digits_vit.yaml")
    cli.main(["fit", "--config", config, "--trainer.enable_progress_bar", "false"])
    words = capsys.readouterr().out.split()
    # Plain training ends near 0.90, see the README.
    assert float(words[words.index("test/acc") + 1]) >= 0.93
    assert len(list((tmp_path / "runs" / "digits_vit").rglob("*.ckpt"))) == 2
    assert list((tmp_path / "runs" / "digits_vit").rglob("events.out.tfevents.*"))
