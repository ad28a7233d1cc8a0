"""What the callbacks hand to TensorBoard."""

import math
import re

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from lit_cond.callbacks.charts import HeatMap, log_figure, log_histogram, log_layout, log_spectra, log_text
from lit_cond.errors import LitCondWarning
from tests.tiny import make_trainer

NAN, INF = math.nan, math.inf


@pytest.fixture
def board(tmp_path):
    """Return a trainer with TensorBoard, and a function that reads back what it has logged."""
    logger = TensorBoardLogger(tmp_path, name="", version="")

    def read():
        logger.finalize("success")
        return EventAccumulator(str(tmp_path), size_guidance={"tensors": 0}).Reload()

    return make_trainer(tmp_path, logger=logger), read


@pytest.mark.parametrize(
    ("values", "lowest", "count", "lost"),
    [
        (torch.full((4,), NAN), None, 0, 4),
        (torch.tensor([]), None, 0, 0),
        ([], None, 0, 0),
        (torch.tensor([1.0, INF, 0.01, NAN, -INF]), -2.0, 2, 3),
        (torch.zeros(3), -16.0, 3, 0),
        (torch.tensor([1.0, 0.0]), -16.0, 2, 0),
        (torch.tensor([0.25, 2.0], dtype=torch.bfloat16), math.log10(0.125), 2, 0),
        (torch.tensor([0.25, 2.0], dtype=torch.float16, requires_grad=True), math.log10(0.125), 2, 0),
        (torch.tensor([[1, 10], [100, 1000]]), -3.0, 4, 0),
        (torch.tensor([1e-300, 1e-301], dtype=torch.float64), -1.0, 2, 0),
        ([torch.tensor([1.0, 0.1]), torch.tensor([1e6, 1e5])], -1.0, 4, 0),
        ([torch.tensor([NAN]), torch.tensor([1.0, 0.1])], -1.0, 2, 1),
    ],
)
def test_d7_a_histogram_of_anything_counts_what_is_not_finite(board, values, lowest, count, lost):
    trainer, read = board
    assert log_histogram(trainer, "spectrum/query", values, 7) == lost
    events = read()
    if lowest is None:
        assert not events.Tags()["histograms"]
    else:
        (event,) = events.Histograms("spectrum/query")
        assert event.step == 7
        assert event.histogram_value.num == count
        assert event.histogram_value.min == pytest.approx(lowest, abs=1e-6)
        assert event.histogram_value.max == pytest.approx(-16.0 if lowest == -16.0 and not values.any() else 0.0)
    scalars = events.Tags()["scalars"]
    assert scalars == (["spectrum/query/nonfinite"] if lost else [])
    if lost:
        assert events.Scalars("spectrum/query/nonfinite")[0].value == lost


@pytest.mark.parametrize(
    "values",
    [
        {"a": torch.tensor([3.0, 1.0])},
        {"a": torch.full((3,), NAN)},
        {"a": torch.tensor([])},
        {"a": [INF, 1.0, 0.0], "b": torch.tensor([1.0], dtype=torch.bfloat16, requires_grad=True)},
        {"a": torch.ones(2, 3, dtype=torch.float16)},
    ],
)
def test_spectra_of_anything_become_a_picture(board, values):
    trainer, read = board
    log_spectra(trainer, "query", values, 3)
    (image,) = read().Images("spectra/query")
    assert image.step == 3
    assert image.width > 400


def test_a_figure_is_a_figure_a_heat_map_or_a_function(board):
    from matplotlib.figure import Figure

    trainer, read = board
    heat = HeatMap("query")
    heat.add("a", 0, 2.0)
    for name, figure in {"figure": Figure(), "map": heat, "function": Figure}.items():
        log_figure(trainer, name, figure, 1)
    assert sorted(read().Tags()["images"]) == ["figure", "function", "map"]


def test_nothing_is_drawn_where_no_logger_shows_pictures(tmp_path):
    def draw():
        raise AssertionError

    log_figure(make_trainer(tmp_path, logger=CSVLogger(tmp_path)), "x", draw, 0)
    log_figure(make_trainer(tmp_path), "x", draw, 0)


def test_a_picture_that_fails_is_left_out_with_a_warning(board):
    def draw():
        raise RuntimeError("no ink")

    trainer, read = board
    with pytest.warns(LitCondWarning, match=r"the picture 'x' is left out: RuntimeError: no ink"):
        log_figure(trainer, "x", draw, 0)
    with pytest.warns(LitCondWarning, match="pip install matplotlib"):
        log_figure(trainer, "x", lambda: __import__("no_such_library"), 0)
    assert not read().Tags()["images"]


def test_the_layout_has_a_chart_for_each_quantity_and_its_patterns_match_these_keys_only(board):
    trainer, read = board
    keys = [
        "cond/tokens/max",
        "cond/tokens/mean",
        "cond/query/mean",
        "cond/query/max",
        "cond_raw/query/mean",
        "cond/query/net.blocks.0.attn",
        "cond/query/nonfinite",
        "entropy/scores/mean",
        "entropy/scores/min",
        "entropy_share/scores/mean",
        "saturated/scores/max",
        "stable_rank/query/min",
        "bound/softmax_derivative/max",
        "val/loss",
    ]
    log_layout(trainer, keys)
    events = read()
    (event,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    charts = {c.title: {chart.title: list(chart.multiline.tag) for chart in c.chart} for c in layout.category}
    assert list(charts)[:3] == ["condition numbers", "attention", "ranks and singular values"]
    assert charts["factors of the bound on the Jacobian"] == {
        "factor of the Jacobian's bound: softmax derivative": ["^bound/softmax_derivative/max$"]
    }
    assert list(charts["condition numbers"]) == ["condition number: query weights", "condition number: tokens"]
    assert len(charts["attention"]) == 3
    shown = {
        title: [
            key for key in [*keys, "cond/query/mean2", "x/cond/query/mean"] if any(re.match(p, key) for p in patterns)
        ]
        for title, patterns in charts["condition numbers"].items()
    }
    assert shown == {
        "condition number: query weights": ["cond/query/mean", "cond/query/max", "cond_raw/query/mean"],
        "condition number: tokens": ["cond/tokens/max", "cond/tokens/mean"],
    }


def test_no_layout_without_keys(board):
    trainer, read = board
    assert log_layout(trainer, ["val/loss", "cond/query/net.0"]) == {}
    assert not read().Tags()["tensors"]


def test_a_text_keeps_its_columns(board):
    trainer, read = board
    log_text(trainer, "conditioning", "a   b")
    (event,) = read().Tensors("conditioning/text_summary")
    assert event.tensor_proto.string_val[0].decode() == "```\na   b\n```"
