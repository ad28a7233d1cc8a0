"""The structure of the repository: layers, lean imports, links at the root."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lit_cond"

# What each layer may import of the package, besides lit_cond.errors and itself.
ALLOWED = {
    "functional": set(),
    "surgery": {"functional"},
    "plots": set(),
    "measuring": {"functional", "surgery"},
    "callbacks": {"functional", "surgery", "measuring", "plots"},
    "report": {"plots", "extras"},
    "tasks": {"surgery", "checkpoint", "extras"},
    "data": {"extras"},
}
LIBRARIES = {
    "functional": {"torch"},
    "surgery": {"torch"},
    "measuring": {"torch"},
    "plots": {"matplotlib"},
    # Lightning itself needs torchmetrics.
    "callbacks": {"torch", "lightning", "torchmetrics", "matplotlib", "typing_extensions"},
}


def imports(path):
    """Yield the full names of the modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield node.module


@pytest.mark.parametrize("layer", ALLOWED)
def test_imports_go_one_way(layer):
    for path in sorted((PACKAGE / layer).glob("*.py")):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "lit_cond":
                assert parts[1] in {layer, "errors", *ALLOWED[layer]}, f"{path.name} imports {name}"
            elif layer in LIBRARIES and parts[0] not in sys.stdlib_module_names:
                assert parts[0] in LIBRARIES[layer], f"{path.name} imports {name}"


def test_callbacks_need_torch_and_lightning_only():
    program = """
import importlib.abc, sys
import torch._dynamo, lightning.pytorch  # these look for optional libraries on their own
absent = ('timm', 'transformers', 'torchvision', 'sklearn', 'rich', 'tensorboard', 'jsonargparse')
for name in [name for name in sys.modules if name.split('.')[0] in absent]:
    del sys.modules[name]
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in absent:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import lit_cond.callbacks
from lit_cond import condition_, load_checkpoint
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_the_functional_interface_does_not_import_lightning():
    program = "import sys, lit_cond.surgery; assert not any(m.startswith('lightning') for m in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", ["tasks", "callbacks"])
def test_root_links_point_into_the_package(name):
    link = ROOT / name
    target = link.readlink().as_posix() if link.is_symlink() else link.read_text().strip()
    assert target == f"lit_cond/{name}"


def test_nothing_is_configured_or_imported_through_the_root_links():
    pattern = re.compile(r"class_path: (tasks|callbacks)\.|^\s*(from|import) (tasks|callbacks)\b", re.MULTILINE)
    files = [*ROOT.glob("configs/**/*.yaml"), *ROOT.glob("scripts/*.py"), *ROOT.glob("*.md"), *PACKAGE.rglob("*.py")]
    assert not [path for path in files if pattern.search(path.read_text())]


def test_modules_stay_readable():
    long = {path.name: n for path in PACKAGE.rglob("*.py") if (n := len(path.read_text().splitlines())) > 400}
    assert not long
