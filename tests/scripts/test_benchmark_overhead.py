import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from lit_cond.functional import spectral_correction
from lit_cond.surgery import find_attention

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark_overhead.py"
TINY = ["--model", "vit_tiny_patch16_224", "--image-size", "32", "--batch-size", "2"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("benchmark_overhead", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their types up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def model(script):
    return script.build("vit_tiny_patch16_224", 32, 2, torch.device("cpu"))


def test_table_and_json(script, tmp_path, capsys):
    path = tmp_path / "overhead.json"
    wanted = ["--only", "again", "identity", "fixed", "gram"]
    assert script.main([*TINY, "--rounds", "3", "--json", str(path), *wanted]) == 0
    record = json.loads(path.read_text())
    assert list(record["results"]) == [
        "plain",
        "plain, again",
        "weights, identity 1",
        "weights, spectral fixed",
        "tokens, identity 1",
        "tokens, exact by gram",
    ]
    assert record["versions"]["torch"] == torch.__version__
    assert record["arguments"]["model"] == "vit_tiny_patch16_224"
    printed = capsys.readouterr().out
    for name, result in record["results"].items():
        assert f"| {name} " in printed
        assert len(result["ratios"]) == len(result["steps"]) == 3
        assert sorted(result["ratios"])[1] == pytest.approx(result["ratio"])
        assert result["ratio_lower_quartile"] <= result["ratio"] <= result["ratio_upper_quartile"]
    assert record["results"]["plain"]["ratios"] == [1.0, 1.0, 1.0]


def test_the_variants_share_parameters_and_differ_in_function(script, model):
    plain, batch = model
    benchmark = script.Benchmark(plain, batch, script.variants(1.0, 100), 100)
    own = {id(p) for p in plain.parameters()}
    outputs = {}
    for name, variant in benchmark.models.items():
        assert {id(p) for p in variant.parameters()} == own
        with torch.no_grad():
            outputs[name] = variant(batch[0])
    plain_output = outputs.pop("plain")
    assert torch.equal(outputs.pop("plain, again"), plain_output)
    assert all((output - plain_output).abs().max() > 1e-4 for output in outputs.values())
    fixed = outputs["weights, spectral fixed"]
    torch.testing.assert_close(outputs["weights, spectral by SVD at every forward"], fixed, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs["tokens, exact by svd"], outputs["tokens, exact by gram"], rtol=1e-3, atol=1e-4)


def test_the_exact_variant_follows_the_weight(script, model):
    plain, batch = model
    changes = {"plain": lambda model: None, "svd": script.spectral_every_forward_}
    benchmark = script.Benchmark(plain, batch, changes, 100)
    layer = benchmark.models["svd"].blocks[0].attn.qkv
    matrix = next(iter(find_attention(plain))).views["key"][0].matrix
    for _ in range(2):
        expected = matrix().detach() + spectral_correction(matrix().detach())
        torch.testing.assert_close(layer.weight[192:384], expected, rtol=0, atol=1e-5)
        with torch.no_grad():
            matrix().mul_(3).add_(0.01)
    benchmark.step("svd")
    assert plain.blocks[0].attn.qkv.weight.grad.isfinite().all()


def test_every_variant_is_timed_once_a_round_in_rotating_order(script, model):
    plain, batch = model
    names = ["plain", "a", script._refreshed(4)]
    ticks = iter(range(10**6))
    benchmark = script.Benchmark(
        plain, batch, {name: lambda model: None for name in names}, 4, clock=lambda: float(next(ticks))
    )
    order = []
    benchmark.step = order.append
    results = benchmark.run(rounds=3, warmup=1, report=lambda line: None)
    assert order[:3] == names[2:] + names[:2]  # the round before the first
    assert order[3:] == [*names, *names[1:], names[0], names[2], *names[:2]]
    assert results["a"].ratios == [1.0] * 3
    assert results[names[2]].ratios == [1.25] * 3  # one tick and a fourth of a refresh that takes one


def test_summary_by_hand(script):
    result = script.Result(steps=[1.0, 2.0, 9.0, 3.0, 2.5], ratios=[1.0, 1.1, 1.2, 1.3, 9.0])
    assert result.summary() == pytest.approx(
        {"seconds": 2.5, "ratio": 1.2, "ratio_lower_quartile": 1.1, "ratio_upper_quartile": 1.3}
    )
    single = script.Result(steps=[1.0], ratios=[1.5]).summary()
    assert all(math.isfinite(value) for value in single.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "vit_huge_typo"], "--model vit_huge_typo is unknown to timm; such names are"),
        (["--model", "xyzzy"], "--model xyzzy is unknown to timm."),
        (["--model", "resnet18", "--image-size", "64"], "--image-size 64 does not fit resnet18"),
        ([*TINY, "--only", "nothing"], "--only nothing matches no variant"),
        ([*TINY, "--device", "quantum"], "quantum"),
        (["--model", "resnet10t", "--rounds", "1"], "attention"),
    ],
)
def test_bad_arguments(script, capsys, arguments, message):
    assert script.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--clock", "moon"], ["--model"], ["--roun", "3"]])
def test_bad_flags(script, capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        script.main(arguments)
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_help_explains(script, capsys):
    with pytest.raises(SystemExit) as caught:
        script.main(["--help"])
    assert caught.value.code == 0
    assert "median over the rounds" in capsys.readouterr().out
