"""Functions, style and scripts that the pages of `vsgd figures` and `vsgd compare` share. Pages are self-contained."""

from __future__ import annotations

import json
import math
from html import escape
from importlib.resources import files
from typing import Any


def asset(name: str) -> str:
    """Return the text of a file in the folder of this module."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def _finite(value: Any) -> Any:
    """Return the value with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def embedded(data: Any) -> str:
    """Return JSON for a <script> element. Numbers that are not finite become null."""
    return json.dumps(_finite(data), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def page(title: str, body: str, data: Any, scripts: list[str]) -> str:
    """Return a page. A script is a file of this folder, or code. The constant DATA in the scripts holds `data`."""
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
