"""Importing the package is light, and its parts depend on each other in one direction only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import vsgd

PACKAGE = Path(vsgd.__file__).parent


def test_import_pulls_in_nothing_heavy():
    heavy = ("torch", "jax", "sklearn", "matplotlib", "scipy", "numba", "pandas")
    code = f"import sys, vsgd; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_rule_runs_without_numpy_or_numba():
    step = "vsgd.step(1.0, vsgd.init(1.0), vsgd.Moments(1.0, 1.0, 1.0, 1.0), 1)"
    code = f"import sys, vsgd; {step}; print('numpy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return found | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}


def test_arrows_of_import_point_one_way():
    """rule ← front ends ← bench ← cli."""
    allowed = {"rule.py": {"vsgd.options"}, "options.py": set(), "probe.py": {"vsgd.options", "vsgd.rule"}}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        ours = {module for module in imports_of(path) if module.startswith("vsgd")}
        if name in allowed:
            assert ours <= allowed[name], name
        if not name.startswith(("bench/", "cli.py", "__main__.py")):
            assert not any(module.startswith(("vsgd.bench", "vsgd.cli")) for module in ours), name
        if name.startswith("bench/"):
            assert "vsgd.cli" not in ours, name
