"""The page, its pictures and the command."""

import base64
import html.parser
import math
import sys

import pytest

from lit_cond.__main__ import main
from lit_cond.plots import colour
from lit_cond.report import Run, pictures, tables, write_report
from tests.report.logs import LAYERS, write_csv, write_events

VOID = {"meta", "img", "br", "link", "hr", "input"}


class Page(html.parser.HTMLParser):
    """Checks that tags close in order; collects images, texts and anchors."""

    def __init__(self, text):
        super().__init__()
        self.open, self.images, self.texts, self.links, self.ids, self.tags = [], [], [], [], [], []
        self.cells = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        attributes = dict(attrs)
        assert not [name for name in attributes if name.startswith("on")]
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if tag == "img":
            self.images.append(attributes)
        if tag == "a":
            self.links.append(attributes["href"])
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if {"td", "th"} & set(self.open):
            self.cells[-1] += data

    @property
    def text(self):
        return " ".join(self.texts)


def read(folder):
    return Page((folder / "index.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Return the folder of a report on two runs that logged everything, with all files of their logs."""
    folder = tmp_path_factory.mktemp("runs")
    write_events(folder / "conditioned" / "version_0")
    write_events(folder / "plain" / "version_0", factor=50.0, corrected=False)
    for name, scale in {"conditioned": "1.0", "plain": "2.0"}.items():
        config = f"model: {{class_path: M, init_args: {{scale: {scale}, same: 1}}}}\n"
        (folder / name / "version_0" / "config.yaml").write_text(config)
    main(["report", str(folder / "conditioned"), str(folder / "plain"), "--out", str(folder / "out")])
    return folder


def test_the_page_holds_all_pictures_and_needs_nothing_else(two_runs):
    page = read(two_runs / "out")
    names = {path.stem for path in (two_runs / "out").glob("*.png")}
    expected = {
        "overview",
        "metrics",
        "attention",
        "stable_rank",
        "sigma_max",
        "sigma_min",
        "bound",
        "heatmap_entropy_share_scores",
        "spectrum_query",
    }
    expected |= {f"condition_{q}" for q in ("query", "tokens", "scores", "jacobian")}
    expected |= {f"heatmap_cond_{q}" for q in ("query", "tokens", "scores", "jacobian")}
    assert names == expected | {"spectra_query_0", "spectra_query_1"}
    assert len(page.images) == len(names)
    files = {path.read_bytes() for path in (two_runs / "out").glob("*.png")}
    for image in page.images:
        start, _, data = image["src"].partition(",")
        assert start == "data:image/png;base64"
        assert base64.b64decode(data) in files
        assert len(image["alt"]) > 20
    text = (two_runs / "out" / "index.html").read_text(encoding="utf-8")
    assert "http://" not in text
    assert "https://" not in text
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert page.links
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)


def test_alternative_texts_say_what_the_curves_show(two_runs):
    page = read(two_runs / "out")
    (alt,) = [image["alt"] for image in page.images if "Condition number of the query weights over" in image["alt"]]
    assert "mean over layers: conditioned from 3.5 to 7.5; conditioned, without its correction from 350 to 750" in alt
    assert "plain from 175 to 375" in alt
    (alt,) = [i["alt"] for i in page.images if i["alt"].startswith("Heat map") and "query weights" in i["alt"]]
    assert f"conditioned: at the end from 6 ({LAYERS[0]}) to 9 ({LAYERS[-1]})" in alt


def test_tables_have_a_column_for_each_run(two_runs):
    cells = read(two_runs / "out").cells

    def row(title):
        at = cells.index(title)
        return cells[at + 1 : at + 3]

    assert row("test/acc") == ["0.9", "0.9"]
    assert row("mean condition number, query weights") == ["7.5", "375"]
    assert row("… query weights, without the correction") == ["750", "—"]
    assert row("query weights") == [f"9 in {LAYERS[-1]}", f"450 in {LAYERS[-1]}"]
    assert row("model.scale") == ["1.0", "2.0"]
    assert "model.same" not in cells


def test_a_run_keeps_its_colour_in_all_pictures(tmp_path):
    runs = [
        Run("a", tmp_path, scalars={"val/loss": {0: 1.0, 1: 0.5}}),
        Run("b", tmp_path, scalars={"cond/query/mean": {0: 2.0, 1: 3.0}, "val/loss": {0: 1.0, 1: 0.4}}),
    ]
    (line,) = pictures.draw_overview(runs).figure.axes[0].lines
    assert line.get_color() == colour(1)
    assert [line.get_color() for line in pictures.draw_metrics(runs).figure.axes[0].lines] == [colour(0), colour(1)]


def test_layers_without_a_finite_number_are_said_and_shown(tmp_path):
    scalars = {
        "cond/query/a": {0: 2.0, 10: math.inf},
        "cond/query/b": {0: 3.0, 10: 3.0},
        "cond/query/mean": {0: 2.5, 10: 3.0},
        "cond/query/max": {0: 3.0, 10: 3.0},
        "cond/query/nonfinite": {10: 1.0},
    }
    runs = [Run("r", tmp_path, scalars=scalars)]
    curves, heat = pictures.draw_quantity(runs, "query")
    assert "r: not finite in up to 1 layers, first at step 10" in curves.caption
    assert [10] in [list(line.get_xdata()) for line in curves.figure.axes[0].lines if line.get_marker() == "^"]
    assert heat.figure.axes[0].lines[0].get_marker() == "x"
    (row,) = tables.worst_layers(runs)
    assert row.cells == ["inf in a"]


def test_what_users_call_things_is_text(tmp_path):
    evil = '<script>alert("1")</script>&"\'$x_{'
    scalars = {f"cond/query/{evil}": {0: 2.0}, "cond/query/b": {0: 3.0}, f"val/{evil}": {0: 1.0, 1: 2.0}}
    scalars[f"cond/{evil}/mean"] = {0: 2.0}
    runs = [
        Run(evil + str(i), tmp_path, scalars=scalars, texts={evil: evil}, settings={evil: evil + str(i)})
        for i in (0, 1)
    ]
    runs[0].notes.append(evil)
    write_report(runs, tmp_path / "out")
    page = read(tmp_path / "out")
    assert "script" not in page.tags
    assert evil in page.text
    assert any(evil in image["alt"] for image in page.images)
    assert all(path.parent == tmp_path / "out" for path in tmp_path.rglob("*.png"))


def test_a_run_without_condition_numbers_has_its_page_and_is_told(tmp_path, capsys):
    write_csv(tmp_path, columns=["step", "val/acc"])
    main(["report", str(tmp_path)])
    assert capsys.readouterr().out == f"wrote {tmp_path / 'report' / 'index.html'}\n"
    page = read(tmp_path / "report")
    assert "This run has logged no condition numbers: add the callback ConditionNumberMonitor" in page.text
    assert [path.stem for path in (tmp_path / "report").glob("*.png")] == ["metrics"]


def test_a_table_of_metrics_makes_the_same_pictures_without_spectra(tmp_path):
    write_csv(tmp_path)
    main(["report", str(tmp_path)])
    names = {path.stem for path in (tmp_path / "report").glob("*.png")}
    assert {"overview", "condition_query", "heatmap_cond_query", "attention", "stable_rank"} <= names
    assert not {"spectrum_query"} & names


def test_nothing_finite_at_all_still_makes_a_page(tmp_path):
    keys = ("cond/query/a", "cond/query/b", "cond/query/mean", "entropy/scores/mean", "val/loss")
    runs = [Run("r", tmp_path, scalars={key: {0: math.nan, 1: math.inf} for key in keys})]
    write_report(runs, tmp_path / "out")
    assert len(read(tmp_path / "out").images) == 5


def test_a_second_report_replaces_the_first_and_finds_the_same_log(tmp_path):
    write_csv(tmp_path, columns=["step", "val/acc"])
    main(["report", str(tmp_path)])
    first = sorted(tmp_path.rglob("*"))
    main(["report", str(tmp_path)])
    assert sorted(tmp_path.rglob("*")) == first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "there is no folder 'none'"),
        (["empty"], "'empty' holds no log"),
        (["run", "run", "--names", "a"], "2 runs and 1 names: give one name for each run"),
        (["run", "run", "--names", "a", "a"], "two runs have the same name"),
        ([], "the following arguments are required: RUN_DIR"),
        (["run", "--color"], "unrecognized arguments: --color"),
        (["run", "--out", "run/metrics.csv"], "'run/metrics.csv' can not be written"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_csv(tmp_path / "run", columns=["step", "val/acc"])
    with pytest.raises(SystemExit) as stop:
        main(["report", *words])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("lit_cond: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_notes_of_the_reading_are_printed_and_on_the_page(tmp_path, capsys):
    write_events(tmp_path / "version_0", steps=[0])
    (tmp_path / "version_0" / "events.out.tfevents.1.noise").write_bytes(b"noise" * 9)
    main(["report", str(tmp_path), "--names", "mine"])
    note = "events.out.tfevents.1.noise holds no event that can be read"
    assert f"mine: {note}\n" in capsys.readouterr().out
    assert note in read(tmp_path / "report").text


@pytest.mark.parametrize(
    ("library", "message"),
    [
        ("tensorboard", "reading TensorBoard's logs needs 'tensorboard', which is not installed: pip install"),
        ("matplotlib", "drawing the pictures of a report needs 'matplotlib', which is not installed: pip install"),
    ],
)
def test_a_missing_library_is_named(tmp_path, monkeypatch, capsys, library, message):
    write_events(tmp_path, steps=[0])
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path)])
    assert message in capsys.readouterr().err
