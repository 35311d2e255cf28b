"""Configuration of the documentation site. `make docs-site` writes site/index.html."""

import re
from typing import Any

from vsgd import __version__

project = "vsgd"
author = "the vsgd authors"
release = version = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx-mathjax-offline",
]
exclude_patterns = ["_build"]

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_output_stderr = "remove"  # messages of the first compilation

autodoc_mock_imports = ["pyspark"]  # needs Java, so it is not part of the extra "dev"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
TYPE_ALIASES = ("ArrayLike", "Gram", "Mask", "Matrix", "PerCoordinate", "PerSample", "RandomState", "Scalar")
autodoc_type_aliases = {name: name for name in TYPE_ALIASES}
python_use_unqualified_type_names = True
napoleon_google_docstring = True
default_role = "code"

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = "vsgd"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}


def as_restructured_text(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Convert a docstring to reStructuredText: escape |x|, and make literal blocks of tables and code."""
    text: list[str] = []
    literal = False
    for line in lines:
        table = line.startswith("|")
        code = line.startswith("    ") and (literal or not text or not text[-1])
        if (table or code) and not literal:
            text += ["::", ""]
        if literal and not (table or code) and line:
            text.append("")
        literal = table or code or (literal and not line)
        text.append(f"    {line}" if table else line if literal else line.replace("|", r"\|"))
    lines[:] = text


def name_type_aliases(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Show type aliases within unions by their names. Sphinx shows them as forward references."""
    return tuple(text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text) for text in (signature, returns))


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", name_type_aliases)
    app.connect("autodoc-process-docstring", as_restructured_text)
