"""The plot of runs from their event files."""

import importlib.util
from pathlib import Path

from lightning.pytorch.loggers import TensorBoardLogger

from lit_cond.callbacks import ConditionNumberMonitor, SpectralConditioning
from tests.tiny import make_loader, make_module, make_trainer

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot_condition_numbers.py"
SPEC = importlib.util.spec_from_file_location("plot_condition_numbers", SCRIPT)
plot = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(plot)


def test_two_runs_become_one_picture(tmp_path, capsys):
    for name, callbacks in {"plain": [], "spectral": [SpectralConditioning()]}.items():
        logger = TensorBoardLogger(tmp_path, name=name, version="")
        trainer = make_trainer(tmp_path, [*callbacks, ConditionNumberMonitor(every_n_steps=1)], logger=logger)
        trainer.fit(make_module(), make_loader())
    runs = {name: plot.read_scalars(tmp_path / name) for name in ("plain", "spectral")}
    steps, values = runs["spectral"]["cond/query/mean"]
    assert steps == [0, 1, 2, 3]
    assert values[0] <= 2.0001
    figure = plot.draw(runs, "loss")
    query = figure.axes[0]
    assert [line.get_label() for line in query.lines] == ["plain", "spectral", "spectral, without its correction"]
    assert list(query.lines[1].get_ydata()) == values
    words = [f"a={tmp_path / 'plain'}", str(tmp_path / "spectral"), "--out", str(tmp_path / "plot.png")]
    assert plot.main(words) == 0
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_folder_without_events_is_named(tmp_path, capsys):
    assert plot.main([str(tmp_path), "--out", str(tmp_path / "plot.png")]) == 2
    assert f"no event file below '{tmp_path}'" in capsys.readouterr().err
