"""What the pages of `vsgd figures` and `vsgd compare` share: style, drawing, and one file that needs nothing else."""

from __future__ import annotations

import json
import math
from html import escape
from importlib.resources import files
from typing import Any


def asset(name: str) -> str:
    """The text of a file beside this module."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def _finite(value: Any) -> Any:
    """JSON knows neither NaN nor infinity: null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def embedded(data: Any) -> str:
    """JSON that may stand in a <script> element; what is not finite is null."""
    return json.dumps(_finite(data), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def page(title: str, body: str, data: Any, scripts: list[str]) -> str:
    """A whole page. The scripts find `data` in the constant DATA; a script is a file of this folder, or code."""
    code = "\n".join(asset(script) if script.endswith(".js") else script for script in scripts)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">
<title>{escape(title)}</title><style>
{asset("page.css")}</style></head><body>
{body}
<script>
"use strict";
const DATA = {embedded(data)};
{code}</script>
</body></html>
"""
