"""Importing the package is light, and its parts depend on each other in one direction only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vsgd

PACKAGE = Path(vsgd.__file__).parent

LAYER = {"core": 0, "errors": 0, "algorithms": 1, "integrations": 3, "bench": 3, "cli": 4, "__main__": 5}
"""Front ends and what they share are layer 2. A module imports from its own layer and from those below."""


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_pulls_in_nothing_heavy():
    heavy = ("numpy", "numba", "torch", "jax", "sklearn", "matplotlib", "scipy", "pandas")
    assert run(f"import sys, vsgd; print([name for name in {heavy} if name in sys.modules])") == "[]"


def test_the_paper_runs_without_numpy_or_numba():
    step = "vsgd.step(1.0, vsgd.init(1.0), vsgd.Moments(1.0, 1.0, 1.0, 1.0), 1)"
    probe = "vsgd.curvature(1.0, 2.0, vsgd.probe(vsgd.init(1.0), 1.0, 1))"
    assert run(f"import sys, vsgd; {step}; {probe}; print('numpy' in sys.modules or 'numba' in sys.modules)") == "False"


def imports_of(path: Path) -> set[str]:
    """The modules of this package that a file imports, at the top or inside a function."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "vsgd"}
    return {module for module in found if module.startswith("vsgd.")}


def test_arrows_of_import_point_one_way():
    """core ← algorithms ← front ends ← integrations, bench ← cli."""
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room != "__init__":
            for module in imports_of(path):
                other = module.split(".")[1]
                assert LAYER.get(other, 2) <= LAYER.get(room, 2), f"{path} imports {module}"


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("vsgd.torch", "torch", "torch"),
        ("vsgd.sklearn", "sklearn", "sklearn"),
        ("vsgd.river", "scipy", "sklearn"),
        ("vsgd.integrations.transformers", "transformers", "integrations"),
        ("vsgd.integrations.lightning", "lightning", "integrations"),
    ],
)
def test_a_missing_dependency_is_answered_by_the_extra_that_has_it(module, missing, extra):
    """The dependency is hidden from a fresh interpreter, as if it were not installed."""
    code = f"""
import sys

class Hidden:
    def find_spec(self, name, *_):
        if name.split(".")[0] == {missing!r}:
            raise ModuleNotFoundError(name=name)

sys.meta_path.insert(0, Hidden())
try:
    import {module}
except ModuleNotFoundError as error:
    print(error)
"""
    said = run(code)
    assert said.startswith(f"{module} needs {missing}")
    assert said.endswith(f"run `pip install '.[{extra}]'` in a clone of vsgd")
