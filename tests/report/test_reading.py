"""Finding logs and reading them."""

import math
import os

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.tensorboard import SummaryWriter

from lit_cond.errors import DataError
from lit_cond.report import Run, read_run
from lit_cond.report.reading import name_runs
from lit_cond.report.settings import setting_differences
from tests.report.logs import LAYERS, scalars, write_csv, write_events


def log(folder, points, key="cond/query/mean", **kwargs):
    before = set(folder.glob("*tfevents*")) if folder.exists() else set()
    writer = SummaryWriter(str(folder), **kwargs)
    for step, value in points.items():
        writer.add_scalar(key, value, step)
    writer.close()
    (file,) = set(folder.glob("*tfevents*")) - before
    return file


def rename(file, second):
    """Give an event file the name that a writer of that second would have given."""
    return file.rename(file.with_name(f"events.out.tfevents.{second}.host.1.0"))


def age(folder, seconds):
    for file in folder.iterdir():
        os.utime(file, (1_700_000_000 - seconds,) * 2)


def test_event_files_become_scalars_histograms_pictures_and_texts(tmp_path):
    write_events(tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert run.name == "run"
    assert run.notes == []
    assert run.last_step == 40
    for key, value in scalars(20).items():
        assert run.scalars[key][20] == pytest.approx(value), key
    assert sorted(run.histograms["spectrum/query"]) == [0, 10, 20, 30, 40]
    histogram = run.histograms["spectrum/query"][0]
    assert sum(histogram.counts) == 32
    assert len(histogram.edges) == len(histogram.counts) + 1
    assert list(histogram.edges) == sorted(histogram.edges)
    assert (histogram.edges[0], histogram.edges[-1]) == pytest.approx((-3.0, 0.0))
    step, image = run.images["spectra/query"]
    assert step == 40
    assert image.startswith(b"\x89PNG")
    assert "a   b" in run.texts["conditioning"]
    assert run.quantities("cond") == ["query", "tokens", "scores", "jacobian"]
    assert list(run.layers("cond", "query")) == LAYERS


def test_a_table_of_metrics_has_the_same_scalars(tmp_path):
    write_csv(tmp_path / "run")
    run = read_run(tmp_path / "run")
    for key, value in scalars(20).items():
        assert run.scalars[key][20] == pytest.approx(value), key
    assert run.scalars["val/acc"] == {s: 0.5 + s / 1000 for s in range(0, 50, 10)}
    # The columns of such a table are sorted as text; layers are shown as they lie in the model.
    assert list(run.layers("cond", "query")) == LAYERS


def test_the_table_that_lightning_writes_is_read_while_it_grows(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="version_0", flush_logs_every_n_steps=1)
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"cond/query/mean": 2.0, "cond/query/a": 2.0}, step=0)
    logger.save()
    assert read_run(tmp_path).scalars == {"cond/query/mean": {0: 2.0}, "cond/query/a": {0: 2.0}}
    logger.log_metrics({"cond/query/mean": math.inf, "cond/query/nonfinite": 1.0}, step=10)
    logger.log_metrics({"val/acc": 0.5}, step=10)
    logger.log_metrics({"val/acc": 0.75}, step=10)
    logger.save()
    run = read_run(tmp_path)
    assert run.scalars["cond/query/mean"] == {0: 2.0, 10: math.inf}
    assert run.scalars["cond/query/nonfinite"] == {10: 1.0}
    assert run.scalars["val/acc"] == {10: 0.75}
    assert run.settings == {"lr": 0.1}


def test_event_files_of_a_resumed_run_are_joined_and_the_later_wins(tmp_path):
    rename(log(tmp_path, {0: 1.0, 10: 2.0, 20: 3.0}), 1_700_000_999)
    rename(log(tmp_path, {20: 30.0, 30: 40.0}), 1_700_001_000)
    assert read_run(tmp_path).scalars["cond/query/mean"] == {0: 1.0, 10: 2.0, 20: 30.0, 30: 40.0}


def test_steps_that_a_writer_has_declared_void_are_gone(tmp_path):
    rename(log(tmp_path, {0: 1.0, 10: 2.0, 25: 3.0}), 1_700_000_999)
    rename(log(tmp_path, {20: 30.0}, purge_step=20), 1_700_001_000)
    assert read_run(tmp_path).scalars["cond/query/mean"] == {0: 1.0, 10: 2.0, 20: 30.0}


def test_a_run_that_is_still_written_is_read_up_to_the_record_that_is_not_whole(tmp_path):
    file = log(tmp_path, {step: float(step) for step in range(100)})
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    run = read_run(tmp_path)
    points = run.scalars["cond/query/mean"]
    assert 40 < len(points) < 60
    assert all(value == step for step, value in points.items())
    (note,) = run.notes
    assert "still being written, was killed, or the file is damaged" in note


def test_a_damaged_record_is_left_out_and_the_rest_is_read(tmp_path):
    file = log(tmp_path, {step: float(step) for step in range(100)})
    data = bytearray(file.read_bytes())
    at = len(data) // 2
    while data[at : at + 5] != b"query":
        at += 1
    data[at] ^= 1
    file.write_bytes(data)
    run = read_run(tmp_path)
    assert list(run.scalars) == ["cond/query/mean"]
    assert len(run.scalars["cond/query/mean"]) == 99
    assert run.notes == [f"{file.name}: 1 of its records are damaged and left out"]
    # Where the next record begins can not be known after a wrong length.
    data[at - 40 : at + 5] = bytes(45)
    file.write_bytes(data)
    run = read_run(tmp_path)
    assert 40 < len(run.scalars["cond/query/mean"]) < 60
    assert "the file is damaged" in run.notes[0]


def test_an_event_file_that_is_a_folder_is_no_log(tmp_path):
    log(tmp_path, {0: 1.0})
    (tmp_path / "events.out.tfevents.1.folder").mkdir()
    assert read_run(tmp_path).notes == []


def test_a_damaged_file_does_not_hide_the_others(tmp_path):
    log(tmp_path, {0: 1.0})
    (tmp_path / "events.out.tfevents.1.noise").write_bytes(b"no event at all" * 10)
    (tmp_path / "events.out.tfevents.2.empty").write_bytes(b"")
    run = read_run(tmp_path)
    assert run.scalars["cond/query/mean"] == {0: 1.0}
    assert run.notes == [
        "events.out.tfevents.1.noise holds no event that can be read",
        "events.out.tfevents.2.empty holds no event, it is empty",
    ]


def test_the_newest_log_below_is_taken_and_the_others_are_named(tmp_path):
    for name, old in {"a/version_0": 7200, "a/version_1": 3600, "b": 90000}.items():
        log(tmp_path / name, {0: float(old)})
        age(tmp_path / name, old)
    run = read_run(tmp_path)
    assert run.folder == tmp_path / "a" / "version_1"
    (note,) = run.notes
    assert "of 3 logs below" in note
    assert "'a/version_1'; the others are a/version_0, b" in note
    assert read_run(tmp_path / "a" / "version_0").notes == []


def test_of_logs_written_together_tensorboard_and_the_highest_version_count(tmp_path):
    for name in ("version_2", "version_10"):
        log(tmp_path / name, {0: 1.0})
        age(tmp_path / name, 0)
    write_csv(tmp_path / "csv")
    age(tmp_path / "csv", -5)
    assert read_run(tmp_path).folder == tmp_path / "version_10"
    age(tmp_path / "csv", -3600)
    assert read_run(tmp_path).folder == tmp_path / "csv"


def test_both_logs_of_one_folder_are_one_run(tmp_path):
    log(tmp_path, {0: 1.0, 10: 2.0})
    write_csv(tmp_path, columns=["step", "val/acc", "cond/query/mean"])
    run = read_run(tmp_path)
    assert run.scalars["cond/query/mean"] == {0: 1.0, 10: 2.0}
    assert run.scalars["val/acc"][40] == pytest.approx(0.54)


def test_single_files_can_be_given(tmp_path):
    file = log(tmp_path, {0: 1.0})
    table = write_csv(tmp_path, columns=["step", "val/acc"])
    assert list(read_run(file).scalars) == ["cond/query/mean"]
    assert list(read_run(table).scalars) == ["val/acc"]


def test_what_is_no_number_in_a_table_is_left_out_and_counted(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        "cond/query/mean,epoch,step,val/acc\n1.5,0,0,\ninf,0,1,x\nnan,0,2,0.5\n7,0,,0.1\n9,0,3.0,0.25,8\n4.5,0,5,0."
    )
    run = read_run(tmp_path)
    points = run.scalars["cond/query/mean"]
    assert math.isnan(points.pop(2))
    assert points == {0: 1.5, 1: math.inf, 3: 9.0, 5: 4.5}
    assert run.scalars["val/acc"] == {2: 0.5, 3: 0.25, 5: 0.0}
    assert run.notes == ["metrics.csv: 2 entries are no numbers and left out"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "it has no column 'step'"),
        ("a,b\n1,2\n", "it has no column 'step'"),
        ("step,a\n", "they hold no number"),
        ("step,a\nx,1\n", "1 entries are no numbers"),
    ],
)
def test_a_table_that_can_not_be_used_is_an_error(tmp_path, content, words):
    (tmp_path / "metrics.csv").write_text(content)
    with pytest.raises(DataError, match=r"can not be used: .*") as error:
        read_run(tmp_path)
    assert words in str(error.value)


def test_an_event_file_that_can_not_be_read_is_an_error_if_it_is_the_only_one(tmp_path):
    (tmp_path / "events.out.tfevents.1").write_bytes(b"nothing" * 50)
    with pytest.raises(DataError, match=r"can not be used: events.out.tfevents.1 holds no event that can be read"):
        read_run(tmp_path)


def test_a_folder_without_logs_and_no_folder_are_errors(tmp_path):
    with pytest.raises(DataError, match=r"holds no log: neither in it nor below it is an event file"):
        read_run(tmp_path)
    with pytest.raises(DataError, match=r"there is no folder .*none'"):
        read_run(tmp_path / "none")


def test_mean_and_worst_are_computed_where_only_layers_were_logged(tmp_path):
    keys = {"cond/query/a": {0: 2.0, 1: math.inf}, "cond/query/b": {0: 4.0, 1: 8.0, 2: math.nan}}
    run = Run("r", tmp_path, scalars=keys)
    assert run.over_layers("cond", "query", "mean") == {0: 3.0, 1: 8.0, 2: math.inf}
    assert run.over_layers("cond", "query", "max") == {0: 4.0, 1: 8.0, 2: math.inf}
    assert run.over_layers("cond", "query", "nonfinite") == {}


def test_long_runs_keep_the_first_and_the_last_histogram(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    for step in range(300):
        writer.add_histogram("spectrum/query", torch.tensor([1.0, 2.0]), step)
    writer.add_scalar("a", 1.0, 0)
    writer.close()
    steps = list(read_run(tmp_path).histograms["spectrum/query"])
    assert len(steps) <= 64
    assert (steps[0], steps[-1]) == (0, 299)
    assert any(100 < step < 200 for step in steps)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (["runs/a/version_0"], ["a/version_0"]),
        (["runs/a/version_0", "runs/b/version_0"], ["a/version_0", "b/version_0"]),
        (["x/run", "y/run"], ["x/run", "y/run"]),
        (["run", "run"], ["run (1)", "run (2)"]),
    ],
)
def test_runs_get_short_names_that_differ(tmp_path, monkeypatch, paths, names):
    monkeypatch.chdir(tmp_path)
    assert name_runs(paths) == names


def test_settings_come_from_the_configuration_else_from_the_hyperparameters(tmp_path):
    log(tmp_path, {0: 1.0})
    (tmp_path / "hparams.yaml").write_text("lr: 0.1\nmodel: !!python/object:os.system {x: 1}\n")
    assert read_run(tmp_path).settings == {"lr": 0.1, "model": "os.system"}
    (tmp_path / "config.yaml").write_text("model: {class_path: M, init_args: {lr: 0.2}}\n")
    assert read_run(tmp_path).settings["model"]["init_args"] == {"lr": 0.2}
    (tmp_path / "config.yaml").write_text("a: [\n")
    run = read_run(tmp_path)
    assert run.settings["lr"] == 0.1
    assert run.notes[0].startswith("config.yaml can not be read: ")


def test_settings_that_differ_and_a_callback_that_is_off_is_one_line():
    def config(callback, lr, folder):
        return {
            "trainer": {"max_epochs": 3, "default_root_dir": folder},
            "model": {"class_path": "M", "init_args": {"lr": lr}},
            "conditioning": callback,
        }

    spectral = {"class_path": "lit_cond.callbacks.SpectralConditioning", "init_args": {"scale": 1.0, "layers": None}}
    assert setting_differences([config(spectral, 0.1, "a"), config(None, 0.2, "b")]) == {
        "model.lr": ["0.1", "0.2"],
        "conditioning": ["SpectralConditioning (scale 1.0)", "null"],
    }
    assert setting_differences([config(spectral, 0.1, "a"), {}])["model.lr"] == ["0.1", "—"]
    assert setting_differences([config(None, 0.1, "a"), config(None, 0.1, "b")]) == {}
