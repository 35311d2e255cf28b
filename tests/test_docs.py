"""Code blocks and tutorials run; links, the API reference, generated sections and the wording of pages are checked.

The code blocks of a page run in order, in one namespace. Definitions that a block needs, such as a model and data, are
in an HTML comment that begins with `setup`. Readers do not see it.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from processes import TIMEOUT

import vsgd

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^(?:```python\n(?P<code>.*?)^```|<!-- setup\n(?P<setup>.*?)^-->)", re.M | re.S)
ABOUT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "RELEASING.md", "SECURITY.md")]
PAGES = [*ABOUT, *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN_BY_COMMANDS = re.compile(r"results(-.*)?\.md")
PROSE = [page for page in PAGES if not WRITTEN_BY_COMMANDS.fullmatch(page.name)]
WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]
CODE = sorted(path for name in ("src", "examples", "benchmarks", "scripts") for path in (ROOT / name).rglob("*.py"))
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def program(page: Path) -> str:
    """Return the setup comments and code blocks of a page, at the line numbers of the page."""
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
    names = runpy.run_path(str(script))
    if page.name == "integrations.md":  # the examples of optax must learn
        assert names["error"] < 0.1
        assert names["train_state"].step == 200
        assert names["last"] < 0.5 * names["first"]


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda tutorial: tutorial.stem)
def test_every_tutorial_runs(tutorial, tmp_path, monkeypatch):
    """Its code cells run as one script. The site runs them in a notebook."""
    cells = [cell for cell in json.loads(tutorial.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells), "outputs are made when the site is built"
    script = tmp_path / tutorial.with_suffix(".py").name
    lines = [line for cell in cells for line in "".join(cell["source"]).splitlines()]
    script.write_text("\n".join(line for line in lines if not line.startswith("%")))  # commands of notebooks
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script))


def test_the_tables_of_readme_are_those_of_the_pages():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    script = runpy.run_path(str(ROOT / "scripts" / "readme_tables.py"))
    assert script["filled"](readme) == readme, "`make results` fills them"
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    assert script["filled"](page, "goals") == page, "`make results` fills them"


def test_readme_is_short():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 100] == []
    assert [line for line in lines if line.startswith("|") and line.count("|") > 7] == []


def prose(page: Path) -> str:
    """Return the text of a page without code, comments and generated sections."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<!-- module tree -->.*?<!-- end of module tree -->", "", text, flags=re.S)
    text = re.sub(r"^```.*?^```|^\$\$.*?^\$\$|<!--.*?-->", "", text, flags=re.M | re.S)
    return re.sub(r"^ {4,}.*$", "", text, flags=re.M)


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_wraps_at_100_characters(page):
    long = [line for line in prose(page).splitlines() if len(line) > 100 and not line.lstrip().startswith(("|", "!["))]
    assert long == []


UNCLEAR = (
    r"anew",
    r"as (?:it|they) (?:is|are|come|comes)\b",
    r"at its best",
    r"best on the way(?! \| lowest)",  # the name of a column in the pages of results
    r"counts? for",
    r"from what",
    r"(?:is|are|was|were|not) asked",
    r"(?:is|are|was|were) told",
    r"overjump\w*",
    r"over-fit\w*",
    r"so many",
    r"spared",
    r"the verdict|verdicts?",
    r"what (?:it|they) (?:is|are) told",
    r"where they (?:is|are)",
    r"whoever",
)
"""Phrases that readers stumble over. Use plain words instead."""


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_uses_plain_words(page):
    text = " ".join(re.sub(r"`[^`\n]*`", "", prose(page)).split())
    unclear = re.compile(rf"\b(?:{'|'.join(UNCLEAR)})\b", re.IGNORECASE)
    assert [text[max(found.start() - 40, 0) : found.end() + 40] for found in unclear.finditer(text)] == []


def test_source_uses_plain_words():
    unclear = re.compile(r"\b(?:anew|counts for|(?:is|are) told|so many|spared|whoever)\b")
    lines = [(path.name, line) for path in CODE for line in path.read_text(encoding="utf-8").splitlines()]
    assert [each for each in lines if unclear.search(each[1])] == []


NOT_VERBS = re.compile(
    r"(?:All|An?|As|By|Every|For|From|How|In|Is|It|None|Of|One|Some|That|The|These|This|What|When|Where|Whether|Which|With)\b"
)
"""First words of docstrings that do not begin with an imperative."""


def test_docstrings_begin_with_a_verb():
    functions = [
        (path.name, node.name, ast.get_docstring(node) or "")
        for path in CODE
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]
    first_lines = [(*place, text.partition("\n")[0]) for *place, text in functions if text]
    assert len(first_lines) > 700
    unusual = re.compile(r"[^A-Z`]")  # symbols, questions
    assert [each for each in first_lines if NOT_VERBS.match(each[2]) or unusual.match(each[2]) or "?" in each[2]] == []


def test_version_is_the_same_everywhere():
    heading = re.search(r"^## \[(\S+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert heading.groups() == (vsgd.__version__, re.search(r"^date-released: (\S+)$", citation, re.M)[1])
    assert re.search(r"^version: (\S+)$", citation, re.M)[1] == vsgd.__version__


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_existing_pages_and_headings():
    links = [
        (page, target, anchor)
        for page in PAGES
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", page.read_text())
    ]
    assert len(links) > 100
    broken = []
    for page, target, anchor in links:
        path = page.parent / target if target else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            broken.append((page.name, target, anchor))
    assert broken == []


def test_design_lists_every_module():
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    script = runpy.run_path(str(ROOT / "scripts" / "module_tree.py"))
    assert script["filled"](page) == page, "`python scripts/module_tree.py` updates the page"


PUBLIC_WITHOUT_ALL = {
    "vsgd.integrations.dask": ["fit"],
    "vsgd.integrations.lightning": ["VSGDMixin"],
    "vsgd.integrations.run_log": ["RunLog", "progress"],
    "vsgd.integrations.spark": ["fit"],
    "vsgd.integrations.transformers": ["VSGDTrainer", "VSGDTrainerMixin"],
    "vsgd.river": ["LogisticRegression"],
}
"""Public names of modules that define no `__all__`."""


def declared_names(module: Path) -> list[str] | None:
    """Return `__all__` of a module without importing it, or None."""
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return None


def public_names() -> set[str]:
    packages = [importlib.import_module(name) for name in ("vsgd", "vsgd.torch", "vsgd.optax", "vsgd.sklearn")]
    names = {f"{package.__name__}.{name}" for package in packages for name in package.__all__}
    for path in [*(ROOT / "src" / "vsgd" / "integrations").glob("*.py"), ROOT / "src" / "vsgd" / "river.py"]:
        module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        declared = declared_names(path)
        names |= {f"{module}.{name}" for name in (PUBLIC_WITHOUT_ALL.get(module, ()) if declared is None else declared)}
    return names


def test_api_reference_covers_exactly_the_public_names():
    pytest.importorskip("optax")
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\.\. (?:auto(?:class|function)|py:data):: (\S+)$", page, re.M))
    assert listed == public_names()


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    settings = ("-q", "-W", "--keep-going", "-D", "nb_execution_mode=off", "-d", tmp_path / "doctrees")
    command = [sys.executable, "-m", "sphinx", *settings, ROOT / "docs", tmp_path / "site"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "without a learning rate to tune" in (tmp_path / "site" / "index.html").read_text()
