"""Figures from plain values."""

import io
import math
import subprocess
import sys
from itertools import pairwise

import matplotlib as mpl
import pytest

from lit_cond.plots import HeatMap, Histogram, Line, Panel, colour, curves, heat_map, histograms, short_names, spectra
from lit_cond.plots.style import log_limits

LAYERS = ["net.blocks.0.attn", "net.blocks.1.attn"]


def render(figure):
    figure.savefig(file := io.BytesIO(), format="png")
    return file.getvalue()


def labels(axis):
    return [tick.get_text() for tick in axis.get_ticklabels()]


def visible(axis, limits):
    low, high = limits
    ticks = zip(axis.get_majorticklocs(), labels(axis), strict=True)
    return [label for place, label in ticks if low <= place <= high]


def test_matplotlib_is_imported_when_something_is_drawn_and_pyplot_never():
    program = """
import sys
from itertools import pairwise
from lit_cond.plots import heat_map
assert "matplotlib" not in sys.modules
heat_map({"": {"a": {0: 2.0}}}, "title")
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_heat_map_has_a_row_for_each_layer_and_crosses_for_what_is_not_finite():
    heat = HeatMap("query")
    for step, value in enumerate([10.0, math.inf, 1000.0]):
        heat.add(LAYERS[0], step, value)
        heat.add(LAYERS[1], step, 20.0)
    figure = heat.figure()
    axes = figure.axes[0]
    table = axes.collections[0].get_array()
    assert table.tolist() == [[10.0, None, 1000.0], [20.0, 20.0, 20.0]]
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[1.5, 0.5]]]
    assert labels(axes.yaxis) == ["0", "1"]
    assert axes.get_ylabel() == "net.blocks.*.attn"
    assert axes.get_ylim() == (2, 0)  # the first layer on top
    assert figure.get_suptitle() == "Condition number of the query weights"
    assert render(figure)


def test_columns_reach_to_the_next_measurement_and_what_was_not_measured_is_white():
    figure = heat_map({"": {"a": {0: 2.0, 10: 3.0, 100: 4.0}, "b": {10: 5.0}}}, "title")
    mesh = figure.axes[0].collections[0]
    assert mesh.get_coordinates()[0, :, 0].tolist() == [0, 10, 100, 190]
    assert mesh.get_array().tolist()[1] == [None, 5.0, None]
    assert not figure.axes[0].lines


def test_runs_share_one_scale_of_colours_with_readable_ticks():
    figure = heat_map({"a": {"x": {0: 3.0}}, "b": {"x": {0: 3e6}}}, "title")
    first, second, bar = figure.axes
    assert first.collections[0].norm is second.collections[0].norm
    assert first.get_title(loc="left") == "a"
    figure.draw_without_rendering()
    assert visible(bar.yaxis, (3, 3e6)) == ["10", "100", "1,000", "10,000", "100,000", "10⁶"]
    assert render(figure)


def test_a_heat_map_that_grows_keeps_its_size_and_its_worst_values():
    heat = HeatMap("query", max_columns=32)
    for step in range(0, 1000, 10):
        heat.add("a", step, 1e6 if step == 490 else math.inf if step == 30 else 10.0)
        heat.add("b", step, 20.0)
    assert heat.columns <= 32
    values = list(heat.values["a"].values())
    assert max(v for v in values if v < math.inf) == 1e6
    assert math.inf in values
    assert min(heat.values["a"]) == 0
    assert heat.values["a"].keys() == heat.values["b"].keys()
    widths = [after - before for before, after in pairwise(heat.values["a"])]
    assert max(widths) <= 2 * 1000 / 16  # the beginning is as fine as the rest, not ever coarser


@pytest.mark.parametrize("values", [{}, {"a": {}}, {"a": {0: math.nan}}, {"a": {0: math.inf, 1: -1.0}}])
@pytest.mark.parametrize("log", [True, False])
def test_a_heat_map_of_nothing_says_so(values, log):
    figure = heat_map({"": values}, "title", log=log)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert ("no finite value" in texts) == (log or -1.0 not in values.get("a", {}).values())
    assert render(figure)


def test_a_hundred_layers_have_labels_that_do_not_overlap():
    figure = heat_map({"": {f"blocks.{i}": {0: 2.0 + i} for i in range(144)}}, "title")
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert len(boxes) > 20
    assert all(above.y0 >= below.y1 - 1 for above, below in pairwise(boxes))


def test_curves_of_two_runs_have_their_colours_one_legend_and_shared_limits():
    lines = [Line("a", {0: 2.0, 10: 200.0}, 0), Line("a, raw", {0: 5000.0}, 0, dashed=True), Line("b", {5: 1e4}, 1)]
    figure = curves([Panel("mean", lines, True, "q"), Panel("worst", lines[:1], True, "q")], "title")
    first, second = figure.axes
    assert [line.get_color() for line in first.lines] == [colour(0), colour(0), colour(1)]
    assert first.lines[1].get_linestyle() != first.lines[0].get_linestyle()
    assert first.get_yscale() == "log"
    assert first.get_ylim() == second.get_ylim()
    assert first.get_xlim() == second.get_xlim()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "a, raw", "b"]
    assert first.lines[0].get_xydata().tolist() == [[0, 2], [10, 200]]
    assert render(figure)


def test_what_is_not_finite_leaves_a_gap_and_a_triangle():
    figure = curves([Panel("p", [Line("a", {0: 2.0, 1: math.inf, 2: 3.0, 3: math.nan, 4: 4.0})], True)])
    curve, beyond = figure.axes[0].lines
    assert [math.isnan(y) for y in curve.get_ydata()] == [False, True, False, True, False]
    assert list(beyond.get_xdata()) == [1, 3]
    assert render(figure)


def test_one_measurement_stands_at_its_step():
    figure = curves([Panel("p", [Line("a", {0: 3.0}), Line("b", {0: math.inf}, 1)], True)])
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert axes.lines[0].get_marker() == "o"
    assert visible(axes.xaxis, axes.get_xlim()) == ["-1", "0", "1"]


def test_more_runs_than_colours_have_markers():
    figure = curves([Panel("p", [Line(str(i), {0: 1.0, 1: 2.0, 2: 3.0}, i) for i in range(16)])])
    looks = [(line.get_color(), line.get_marker()) for line in figure.axes[0].lines]
    assert len(set(looks)) == 16
    assert render(figure)


@pytest.mark.parametrize("points", [{}, {0: math.nan}, {0: math.inf}, {0: 0.0}, {0: 1.0}, {0: 1e300, 1: 1e-300}])
@pytest.mark.parametrize("log", [True, False])
def test_curves_of_anything(points, log):
    assert render(curves([Panel("p", [Line("a", points)], log)]))
    assert render(curves([Panel("p", [], log)]))


def test_spectra_descend_and_count_what_has_no_place():
    figure = spectra(
        {LAYERS[0]: [1.0, 100.0, 10.0], LAYERS[1]: [5.0, 0.0, math.nan, math.inf], "net.blocks.2.attn": []}, "t"
    )
    first, second, _ = figure.axes[0].lines
    assert first.get_ydata().tolist() == [100, 10, 1]
    assert second.get_ydata().tolist() == [5]
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["0  κ 100", "1  1 of 4 zero  2 of 4 not finite", "2  empty"]
    assert figure.legends[0].get_title().get_text() == "net.blocks.*.attn"
    assert render(figure)


@pytest.mark.parametrize("values", [{}, {"a": []}, {"a": [math.nan]}, {"a": [0.0, 0.0]}])
def test_spectra_of_nothing_say_so(values):
    figure = spectra(values, "t")
    assert figure.axes[0].texts[0].get_text() == "no finite value"
    assert render(figure)


def test_histograms_keep_the_number_of_values_whatever_the_width_of_bins():
    # The bins of TensorBoard: tiny ones at zero, wide ones far from it.
    uneven = Histogram((-2.0, -1.0, -0.1, -1e-12, 0.0, 1e-12), (2.0, 4.0, 0.0, 1.0, 1.0))
    figure = histograms(
        {"a": {0: uneven, 7: Histogram((-3.0, 1.0), (5.0,))}, "b": {0: Histogram((0.0, 1.0), (0.0,))}}, "t", "x"
    )
    heights = [patch.get_data().values for patch in figure.axes[0].patches]
    assert [sum(row) for row in heights] == pytest.approx([1.0] * 4)
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["step 0", "step 7"]
    edges = figure.axes[0].patches[0].get_data().edges
    assert sum(heights[0][edges[:-1] < -1.001]) == pytest.approx(2 / 8, abs=0.02)
    assert figure.axes[1].texts[0].get_text() == "no finite value"
    assert render(figure)


def test_names_are_text_and_no_formulas():
    figure = spectra({"$\\frac{a$": [1.0, 2.0]}, "$x_")
    assert render(figure)


def test_the_style_is_the_same_whatever_the_user_has_set_and_nothing_is_set():
    with mpl.rc_context({"lines.linewidth": 9.0, "font.size": 30.0}):
        figure = curves([Panel("p", [Line("a", {0: 1.0, 1: 2.0, 2: 3.0})])])
        assert figure.axes[0].lines[0].get_linewidth() < 3
        assert mpl.rcParams["font.size"] == 30.0


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["net.blocks.0.attn", "net.blocks.11.attn"], (["0", "11"], "net.blocks.*.attn")),
        (["a.0", "a.1.b"], (["0", "1.b"], "a.*")),
        (["a", "a.b"], (["a", "a.b"], "")),
        (["x", "y"], (["x", "y"], "")),
        (["only"], (["only"], "")),
        ([], ([], "")),
        (["a.a.a", "a.a"], (["a.a.a", "a.a"], "")),
    ],
)
def test_short_names(names, expected):
    assert short_names(names) == expected


def test_logarithmic_limits_span_a_decade_and_begin_at_one_for_condition_numbers():
    assert log_limits([100.0]) == pytest.approx((10**1.5, 10**2.5))
    assert log_limits([1.0, 2.0]) == pytest.approx((1.0, 10.0))
    assert log_limits([2.0, 4000.0, math.inf, math.nan, 0.0]) == pytest.approx((2.0, 4000.0))
    assert log_limits([0.001, 10.0]) == pytest.approx((0.001, 10.0))
    assert log_limits([math.nan]) is None
