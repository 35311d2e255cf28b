"""Fill the module tree of docs/design.md from the first lines of the modules' docstrings.

Run `python scripts/module_tree.py` after adding, removing or renaming a module. A test fails if the page is out of
date.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "design.md"
SOURCE = ROOT / "src"
PACKAGES = ("vsgd", "vsgd_bench")


def summary(module: Path) -> str:
    """Return the first paragraph of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))
    if docstring is None:
        raise SystemExit(f"{module.relative_to(ROOT)} has no docstring; write one that says what the module contains")
    return " ".join(docstring.partition("\n\n")[0].split()).replace("|", r"\|").replace("<", r"\<")


def table(folder: Path) -> str:
    """Return a heading and a table of the modules in one folder."""
    name = ".".join(folder.relative_to(SOURCE).parts)
    modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    lines = [f"### `{name}`", "", summary(folder / "__init__.py"), ""]
    if modules:
        lines += ["| module | content |", "|---|---|"]
        lines += [f"| `{module.name}` | {summary(module)} |" for module in modules]
        lines += [""]
    return "\n".join(lines)


def tree() -> str:
    """Return the tables of all packages, parents before children."""
    folders = [
        path.parent
        for package in PACKAGES
        for path in sorted((SOURCE / package).rglob("__init__.py"), key=lambda p: p.parent)
    ]
    return "\n".join(table(folder) for folder in folders)


def filled(text: str) -> str:
    """Return the page with the current module tree."""
    pattern = r"(<!-- module tree -->\n).*?(<!-- end of module tree -->)"
    text, found = re.subn(pattern, lambda match: f"{match[1]}\n{tree()}\n{match[2]}", text, flags=re.DOTALL)
    if found != 1:
        raise SystemExit("docs/design.md has no comment `<!-- module tree -->`")
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
