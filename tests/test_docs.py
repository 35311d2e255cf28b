"""Every Python block of README and docs runs, and every tutorial.

The blocks of a page run in their order, in one namespace. What a block takes for granted (a model, some data) stands in
an HTML comment that begins with `setup`, which readers do not see.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^(?:```python\n(?P<code>.*?)^```|<!-- setup\n(?P<setup>.*?)^-->)", re.M | re.S)
PAGES = [
    page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if "```python" in page.read_text()
]
WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def program(page: Path) -> str:
    """Set-up first, wherever it stands before the next block, with the line numbers of the page."""
    text = page.read_text()
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        name = "code" if block["code"] is not None else "setup"
        first = text.count("\n", 0, block.start(name))
        for number, line in enumerate(block[name].splitlines()):
            lines[first + number] = line
    return "\n".join(lines)


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_runs(page, tmp_path, monkeypatch):
    script = tmp_path / page.with_suffix(".py").name
    script.write_text(program(page))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script))


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda tutorial: tutorial.stem)
def test_every_tutorial_runs(tutorial, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(tutorial, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are made when the site is built"
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()


def test_the_tables_of_readme_are_those_of_the_pages():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    script = runpy.run_path(str(ROOT / "scripts" / "readme_tables.py"))
    assert script["filled"](readme) == readme, "`make results` fills them"


def test_pages_link_to_what_is_there():
    link = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
    links = [(page, target) for page in PAGES for target in link.findall(page.read_text())]
    assert len(links) > 30
    assert [(page.name, target) for page, target in links if not (page.parent / target).exists()] == []


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    settings = ("-q", "-W", "--keep-going", "-D", "nb_execution_mode=off", "-d", tmp_path / "doctrees")
    command = [sys.executable, "-m", "sphinx", *settings, ROOT / "docs", tmp_path / "site"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert "without a learning rate to tune" in (tmp_path / "site" / "index.html").read_text()
