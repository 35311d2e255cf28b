"""Digests of source do not depend on docstrings, comments, formatting, or code that a run does not use."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest

import vsgd
from vsgd_bench.provenance import (
    Definition,
    below,
    definitions_digest,
    describe,
    import_closure,
    installed,
    modules_digest,
    reached,
)

pytest.importorskip("torch")

from vsgd_bench.compare.opponents import ADAMW_COSINE, MUON_COSINE
from vsgd_bench.compare.runs import OPTIMIZER_MODULES, WITHOUT_INFLUENCE
from vsgd_bench.compare.train import train
from vsgd_bench.compare.workloads import digits_mlp, fashion_cnn

SOURCE = Path(vsgd.__file__).parents[1]


class TestModules:
    """Digest of the library."""

    MODULES = ("vsgd.algorithms.paper",)

    def digest(self, find):
        return modules_digest(self.MODULES, find=find)

    def write(self, folder, text):
        (folder / "vsgd" / "algorithms").mkdir(parents=True)
        (folder / "vsgd" / "__init__.py").write_text('"""A library."""\n__version__ = "1"\n')
        (folder / "vsgd" / "algorithms" / "__init__.py").write_text("")
        (folder / "vsgd" / "core.py").write_text("def square(x):\n    return x * x\n")
        (folder / "vsgd" / "algorithms" / "paper.py").write_text(text)
        return below(folder)

    ORIGINAL = '''"""An algorithm."""
from vsgd.core import square

MEMORY: float = 2.0
"""A constant."""


class Config:
    """Constants."""

    memory: float = MEMORY
    """τ"""


def rate(x: float) -> float:
    """Return the rate."""
    return square(x) / Config.memory
'''

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ('"""An algorithm."""', '"""One algorithm\nof several."""'),
            ('"""A constant."""', '"""Of samples."""'),
            ('    """τ"""\n', ""),
            ('    """Return the rate."""\n', "    # the rate\n"),
            ("return square(x) / Config.memory", "return (\n        square(x)\n        / Config.memory\n    )"),
            ("x: float) -> float", "x: 'Array') -> Array"),
            ("MEMORY: float", "MEMORY: int | float"),
        ],
    )
    def test_text_and_formatting_do_not_change_it(self, tmp_path, old, new):
        assert old in self.ORIGINAL
        before = self.digest(self.write(tmp_path / "a", self.ORIGINAL))
        assert self.digest(self.write(tmp_path / "b", self.ORIGINAL.replace(old, new))) == before

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("2.0", "3.0"),
            ("square(x) / ", "square(x) * "),
            ("def rate", "def speed"),
            ("memory: float = ", "memory = 0 + "),
        ],
    )
    def test_any_change_of_executed_code_changes_the_digest(self, tmp_path, old, new):
        assert old in self.ORIGINAL
        before = self.digest(self.write(tmp_path / "a", self.ORIGINAL))
        assert self.digest(self.write(tmp_path / "b", self.ORIGINAL.replace(old, new))) != before

    def test_what_is_imported_counts_unless_it_is_excepted(self, tmp_path):
        first, second = (self.write(tmp_path / name, self.ORIGINAL) for name in "ab")
        (tmp_path / "b" / "vsgd" / "core.py").write_text("def square(x):\n    return x**2\n")
        assert self.digest(first) != self.digest(second)
        assert modules_digest(self.MODULES, ["vsgd.core"], first) == modules_digest(self.MODULES, ["vsgd.core"], second)


class TestStoredRuns:
    """The digests of runs, for copies of the repository in which something was edited."""

    @pytest.fixture
    def edited(self, tmp_path):
        """Return a function that copies the source, edits files that match patterns, and finds modules of the copy."""

        def edit(change, *patterns):
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("__pycache__", "web"))
            for pattern in patterns:
                files = list(folder.glob(pattern))
                assert files, pattern
                for file in files:
                    file.write_text(change(file.read_text()))
            return below(folder)

        return edit

    @staticmethod
    def with_other_words(text):
        return text.replace('"""', '"""Edited. ', 1) + '\n# a comment\n"""A string."""\n'

    @staticmethod
    def defining(name):
        """Return an edit that adds a definition, or replaces the one with the same name."""
        return lambda text: text + f"\n\ndef {name}(*_):\n    return 1\n"

    def of_library(self, find=installed):
        return modules_digest(OPTIMIZER_MODULES, WITHOUT_INFLUENCE, find)

    def test_the_digest_of_the_library_follows_meaning(self, edited):
        before = self.of_library()
        assert self.of_library(edited(self.with_other_words, "vsgd/**/*.py")) == before
        assert self.of_library(edited(self.defining("ema"), "vsgd/core.py")) != before

    def test_what_the_optimizer_does_not_import_leaves_its_digest(self, edited):
        elsewhere = ("linear/*.py", "files/*.py", "algorithms/columns.py", "__init__.py", "disk.py", "cli.py")
        changed = edited(self.defining("added"), *(f"vsgd/{pattern}" for pattern in elsewhere))
        assert self.of_library(changed) == self.of_library()

    def test_the_digests_of_the_laboratory_follow_meaning(self, edited):
        def digests(find=installed):
            task, *others = (describe(f, find) for f in (digits_mlp, fashion_cnn, ADAMW_COSINE.make, MUON_COSINE.make))
            return task, others, definitions_digest(train, find)

        before = digests()
        assert digests(edited(self.with_other_words, "vsgd_bench/**/*.py")) == before
        assert digests(edited(self.defining("ema"), "vsgd/**/*.py")) == before, "the library is no part of them"
        others = ("workloads", "opponents", "ours", "data", "networks", "train")
        added = edited(self.defining("added"), *(f"vsgd_bench/compare/{file}.py" for file in others))
        assert digests(added) == before, "a definition beside them is no part of them"
        task, others, training = digests(edited(self.defining("mlp"), "vsgd_bench/compare/networks.py"))
        assert (task == before[0], others == before[1], training == before[2]) == (False, True, True)
        task, others, training = digests(edited(self.defining("judged"), "vsgd_bench/compare/train.py"))
        assert (task == before[0], others == before[1], training == before[2]) == (True, True, False)

    def test_arguments_are_part_of_a_description(self):
        with_one, with_other = (functools.partial(digits_mlp, 0, sparse=sparse) for sparse in (True, False))
        assert describe(with_one) != describe(with_other)
        assert describe(functools.partial(fashion_cnn, 0, sparse=True)) != describe(with_one)
        outer = [functools.partial(digits_mlp, inner) for inner in (digits_mlp, fashion_cnn)]
        assert describe(outer[0]) != describe(outer[1]), "functions as arguments count"

    def test_only_what_is_executed_is_reached(self):
        names = {definition.name for definition in reached(Definition(digits_mlp.__module__, "digits_mlp"))}
        assert {"digits_mlp", "Task", "mlp", "digits", "shuffled", "Split"} <= names
        assert not {"Workload", "WORKLOADS", "fashion_cnn"} & names

    def test_a_step_is_in_the_import_closure_and_other_front_ends_are_not(self):
        modules = import_closure(OPTIMIZER_MODULES, WITHOUT_INFLUENCE)
        assert {"vsgd.core", "vsgd.algorithms.networks", "vsgd.torch.optimizer", "vsgd.jit"} <= set(modules)
        assert not [name for name in modules if name.startswith(("vsgd.linear", "vsgd.optax", "vsgd.integrations"))]
