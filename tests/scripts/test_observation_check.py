"""The sweep over models, on some of them."""

from scripts.observation_check import QUANTITIES, check, lines_of, main


def test_layers_are_measured_or_have_a_reason(tmp_path, capsys):
    found = check("torchvision", 4)
    assert found.models > 3
    assert not found.faults
    without = sum(sum(m.values()) for (quantity, _), m in found.reasons.items() if quantity in ("all", "scores"))
    assert found.measured["scores"] + without == found.layers
    assert set(found.measured) == set(QUANTITIES)
    found.faults.append("planted")
    assert "- planted" in lines_of("torchvision", found)


def test_the_report_is_written(tmp_path):
    path = tmp_path / "report.md"
    assert main(["--source", "torchvision", "--every", "8", "--report", str(path)]) == 0
    assert "## torchvision" in path.read_text()
