"""Digests of the source code that produced a result.

A digest is computed from syntax trees, without docstrings, comments, formatting and annotations. There are two kinds:

- `modules_digest` covers modules and the modules of their package that they import, directly or indirectly. It is
  used for the library, where a step may call any function.
- `definitions_digest` covers a function and the top-level definitions of this package that it refers to, directly or
  indirectly. A new workload or optimizer in the same file does not change it. The library is not included.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

LABORATORY = "vsgd_bench"

NOT_EXECUTED = ("annotation", "returns", "type_params", "type_comment", "kind", "ctx")
"""Fields of syntax trees that do not influence a result. Annotations are not evaluated in any module."""

Find = Callable[[str], Path | None]
"""Returns the file of a module, or None if there is no such module."""


def installed(module: str) -> Path | None:
    """Return the file of a module that can be imported here."""
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):
        return None
    return None if spec is None or not spec.has_location or spec.origin is None else Path(spec.origin)


def below(folder: Path) -> Find:
    """Return a `Find` for the packages in a folder, which need not be on the import path."""

    def find(module: str) -> Path | None:
        path = folder.joinpath(*module.split("."))
        files = (path / "__init__.py", path.with_suffix(".py"))
        return next((file for file in files if file.is_file()), None)

    return find


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def parts(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield the fields that can influence a result. Empty fields are skipped: they depend on the version of Python."""
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            value = [item for item in value if not is_text(item)]
        if name not in NOT_EXECUTED and value is not None and value != []:
            yield name, value


def is_text(node: Any) -> bool:
    """Return whether a statement is a docstring, or a string that describes the attribute above it."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def written(value: Any) -> str:
    """Return a syntax tree as text. Docstrings, comments and annotations do not change it."""
    if isinstance(value, ast.AST):
        return f"{type(value).__name__}({', '.join(f'{name}={written(part)}' for name, part in parts(value))})"
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    return repr(value)


@functools.cache
def text_of(file: Path) -> str:
    """Return the syntax tree of a file as text."""
    return written(tree_of(file))


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all nodes in it that can influence a result."""
    yield node
    for _, value in parts(node):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                yield from executed(item)


def digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


# --- whole modules ------------------------------------------------------------------------------------------------


def imports(tree: ast.AST) -> dict[str, tuple[str, str | None]]:
    """Return the source of each imported name: a module, or a module and a name in it. Imports are absolute."""
    found: dict[str, tuple[str, str | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name] = (alias.name, None)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = (node.module, alias.name)
    return found


def import_closure(modules: Iterable[str], without: Iterable[str] = (), find: Find = installed) -> dict[str, Path]:
    """Return the files of modules and of all modules of the same packages that they import, directly or indirectly.

    The modules of `without` are skipped, together with their imports.
    """
    pending = list(modules)
    excluded = set(without)
    packages = {module.partition(".")[0] for module in pending}
    found: dict[str, Path] = {}
    while pending:
        module = pending.pop()
        is_ours = module.partition(".")[0] in packages and module not in excluded
        if module in found or not is_ours or (file := find(module)) is None:
            continue
        found[module] = file
        pending += [module.rpartition(".")[0]]  # an import also executes the packages of a module
        for source, name in imports(tree_of(file)).values():
            pending += [source, f"{source}.{name}"]
    return found


def modules_digest(modules: Iterable[str], without: Iterable[str] = (), find: Find = installed) -> str:
    """Return a digest of the files of `import_closure`."""
    closure = import_closure(modules, without, find)
    return digest(f"{name}\n{text_of(closure[name])}" for name in sorted(closure))


# --- single definitions -------------------------------------------------------------------------------------------


class Definition(NamedTuple):
    """A name at the top level of a module."""

    module: str
    name: str


def definitions(tree: ast.Module) -> dict[str, list[ast.stmt]]:
    """Return the top-level statements that define each name."""
    found: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [statement.name]
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
        else:
            stored = (n for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            names = [node.id for node in stored]
        for name in names:
            found.setdefault(name, []).append(statement)
    return found


def reached(start: Definition, find: Find = installed) -> dict[Definition, list[ast.stmt]]:
    """Return a definition and all that it refers to, directly or indirectly, in its module and in `LABORATORY`."""
    found: dict[Definition, list[ast.stmt]] = {}
    pending = [start]
    while pending:
        definition = pending.pop()
        is_followed = definition.module == start.module or definition.module.partition(".")[0] == LABORATORY
        if definition in found or not is_followed or (file := find(definition.module)) is None:
            continue
        tree = tree_of(file)
        imported = imports(tree)
        if (statements := definitions(tree).get(definition.name)) is None:
            if definition.name in imported:  # the module imports the name and exports it
                module, name = imported[definition.name]
                pending += [Definition(module, name)] if name else []
            continue
        found[definition] = statements
        for node in (node for statement in statements for node in executed(statement)):
            if isinstance(node, ast.Name):
                module, name = imported.get(node.id, (definition.module, node.id))
                pending += [Definition(module, name)] if name else []
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
                module, name = imported[node.value.id]
                pending += [Definition(f"{module}.{name}" if name else module, node.attr)]
    return found


@functools.cache
def definitions_digest(function: Callable[..., Any], find: Find = installed) -> str:
    """Return a digest of a top-level function and of the definitions that it refers to."""
    found = reached(Definition(function.__module__, function.__qualname__.partition(".")[0]), find)
    return digest(f"{key.module}.{key.name}\n{written(found[key])}" for key in sorted(found))


def describe(value: Any, find: Find = installed) -> str:
    """Return text that identifies the code of a function, or of the function and arguments of a `functools.partial`."""
    if isinstance(value, functools.partial):
        arguments = [describe(argument, find) for argument in value.args]
        named = [f"{name}={describe(argument, find)}" for name, argument in sorted(value.keywords.items())]
        return f"{describe(value.func, find)}({', '.join([*arguments, *named])})"
    if callable(value) and hasattr(value, "__qualname__"):
        return definitions_digest(value, find)
    return repr(value)
