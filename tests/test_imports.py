"""Importing the package is fast, and its parts depend on each other in one direction only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from processes import TIMEOUT

import vsgd

PACKAGE = Path(vsgd.__file__).parent

LAYER = {"core": 0, "errors": 0, "algorithms": 1, "integrations": 3, "cli": 4, "__main__": 5}
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
    """Return the modules that a file imports, at the top or inside functions."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "vsgd"}
    return found


def test_arrows_of_import_point_one_way():
    """core ← algorithms ← front ends ← integrations ← cli."""
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room != "__init__":
            for module in imports_of(path):
                package, _, rest = module.partition(".")
                if package == "vsgd" and rest:
                    other = rest.partition(".")[0]
                    assert LAYER.get(other, 2) <= LAYER.get(room, 2), f"{path} imports {module}"


def test_the_library_does_not_import_the_laboratory():
    """`vsgd.cli` finds it by name, and works without it."""
    importers = [path for path in PACKAGE.rglob("*.py") if any(m.startswith("vsgd_bench") for m in imports_of(path))]
    assert importers == []


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
    """A new interpreter cannot import the dependency, as if it were not installed."""
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


@pytest.mark.parametrize(
    "command", ["figures", "compare --suite large --seeds 2", "sparse --help", "compare extra words"]
)
def test_commands_of_the_laboratory_say_in_one_sentence_that_they_are_in_the_repository(command, tmp_path):
    absent = """
import importlib.util, sys

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *_: None if name == "vsgd_bench" else find_spec(name, *_)
from vsgd.cli import main
sys.exit(main(sys.argv[1:]))
"""
    done = subprocess.run(
        [sys.executable, "-c", absent, *command.split()], capture_output=True, text=True, cwd=tmp_path, timeout=TIMEOUT
    )
    name = command.split()[0]
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"vsgd: `vsgd {name}` is part of the repository")
    assert "pip install --editable" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_unknown_arguments_of_other_commands_are_refused():
    done = subprocess.run([sys.executable, "-m", "vsgd", "figures", "--nonsense"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "unrecognized arguments: --nonsense" in done.stderr
