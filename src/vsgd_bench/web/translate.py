"""Translate Python functions of plain arithmetic to JavaScript, so that a page runs the code of the package.

`Translator.add` translates a function and all functions that it calls. It supports assignments, `if`, `for` over a
range, `return`, arithmetic, comparisons, NamedTuples (as objects with the same fields) and the functions of `LIBRARY`.
Anything else raises TypeError. Tuples become arrays, and `x[i, j]` an element of an array of arrays. A boolean is 0 or
1 in both languages.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import textwrap
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from scipy import special

LIBRARY: dict[Any, str] = {
    **{abs: "Math.abs", max: "Math.max", min: "Math.min", int: "Math.trunc"},
    **{np.maximum: "Math.max", np.empty: "new Float64Array", np.sign: "Math.sign"},
    **{np.exp: "Math.exp", np.expm1: "Math.expm1", np.sqrt: "Math.sqrt"},
    **{special.erf: "erf", special.log_ndtr: "logNormalCdf"},  # written in special.js
}
BINARY: dict[type, str] = {
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"},
    **{ast.BitAnd: "&", ast.BitOr: "|", ast.And: "&&", ast.Or: "||"},
    **{ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="},
    **{ast.Is: "===", ast.IsNot: "!=="},
}
UNARY: dict[type, str] = {ast.USub: "-", ast.Not: "!"}
UNKNOWN = object()


def js_name(function: Callable[..., Any]) -> str:
    """Return the name in JavaScript: module and name, since functions of several modules may share a name."""
    return f"{function.__module__.split('.')[-1]}_{function.__name__}"


class Translator:
    """Translates functions and all functions that they call."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def add(self, function: Callable[..., Any]) -> str:
        """Translate a function if necessary, and return its name in JavaScript."""
        name = js_name(function)
        if name not in self._texts:
            self._texts[name] = ""  # it may be recursive
            self._texts[name] = _Body(self, function).text(name)
        return name

    def literal(self, value: Any) -> str:
        """Return the JavaScript of a constant, a NamedTuple of constants, or a function."""
        if isinstance(value, FunctionType):
            return self.add(value)
        if isinstance(value, tuple) and hasattr(value, "_asdict"):
            return "{" + ", ".join(f"{key}: {self.literal(item)}" for key, item in value._asdict().items()) + "}"
        if value is None or isinstance(value, (bool, int, float, str)):
            return json.dumps(value, ensure_ascii=False)
        raise TypeError(f"{value!r} has no counterpart in JavaScript")

    def text(self) -> str:
        return "\n".join(self._texts.values())


class _Body:
    """Translates one function."""

    def __init__(self, translator: Translator, function: Any):
        (self._tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        self._translator, self._function = translator, function
        self._parameters = inspect.signature(function).parameters
        stored = (n.id for n in ast.walk(self._tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        self._assigned = sorted(set(stored) - set(self._parameters))
        self._labels: list[str] = []

    def text(self, name: str) -> str:
        parameters = [
            key if p.default is p.empty else f"{key} = {self._translator.literal(p.default)}"
            for key, p in self._parameters.items()
        ]
        declared = [f"let {', '.join(self._assigned)};"] if self._assigned else []
        lines = [*declared, *self._block(self._tree.body)]  # type: ignore[attr-defined]
        return "\n".join([f"function {name}({', '.join(parameters)}) {{", *("  " + line for line in lines), "}"])

    def _refuse(self, node: ast.AST) -> TypeError:
        where = f"{self._function.__module__}.{self._function.__name__}"
        return TypeError(f"{where}: `{ast.unparse(node)}` has no translation to JavaScript")

    def _block(self, nodes: list[ast.stmt]) -> list[str]:
        return [line for node in nodes for line in self._statement(node)]

    def _indented(self, nodes: list[ast.stmt]) -> list[str]:
        return ["  " + line for line in self._block(nodes)]

    def _statement(self, node: ast.stmt) -> list[str]:
        match node:
            case ast.Expr(value=ast.Constant()):
                return []  # a docstring
            case ast.Return(value=ast.expr() as value):
                return [f"return {self._expression(value)};"]
            case ast.Assign(targets=[target], value=value):
                return [f"{self._expression(target)} = {self._expression(value)};"]
            case ast.AugAssign(target=target, op=op, value=value) if type(op) in BINARY:
                return [f"{self._expression(target)} {BINARY[type(op)]}= {self._expression(value)};"]
            case ast.If(test=test, body=body, orelse=orelse):
                otherwise = ["} else {", *self._indented(orelse)] if orelse else []
                return [f"if ({self._expression(test)}) {{", *self._indented(body), *otherwise, "}"]
            case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range"), args=limits)):
                first, last = ["0", *map(self._expression, limits)][-2:]
                return self._loop(f"for ({name} = {first}; {name} < {last}; {name}++)", node)
            case ast.Break():
                return [f"break {self._labels[-1]};"]
        raise self._refuse(node)

    def _loop(self, head: str, node: ast.For) -> list[str]:
        """Return a loop. `break` leaves a labelled block that also contains the `else` branch."""
        label = f"loop{node.lineno}"
        self._labels.append(label)
        body = [f"  {head} {{", *("  " + line for line in self._indented(node.body)), "  }"]
        self._labels.pop()
        return [f"{label}: {{", *body, *self._indented(node.orelse), "}"]

    def _static(self, node: ast.expr) -> Any:
        """Return the value of a name of the module, or of an attribute of a module that it imports."""
        match node:
            case ast.Name(id=name) if name not in self._parameters and name not in self._assigned:
                return self._function.__globals__.get(name, getattr(builtins, name, UNKNOWN))
            case ast.Attribute(value=value, attr=attr) if isinstance(module := self._static(value), ModuleType):
                return getattr(module, attr)
        return UNKNOWN

    def _expression(self, node: ast.expr) -> str:
        if (value := self._static(node)) is not UNKNOWN:
            return self._translator.literal(value)
        match node:
            case ast.Constant(value=value):
                return self._translator.literal(value)
            case ast.Name(id=name):
                return name
            case ast.Attribute(value=owner, attr=attr):
                return f"{self._expression(owner)}.{attr}"
            case ast.Tuple(elts=items):
                return f"[{', '.join(map(self._expression, items))}]"
            case ast.Subscript(value=owner, slice=ast.Tuple(elts=indices)):
                return self._expression(owner) + "".join(f"[{self._expression(index)}]" for index in indices)
            case ast.Subscript(value=owner, slice=index):
                return f"{self._expression(owner)}[{self._expression(index)}]"
            case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
                return f"Math.floor({self._expression(left)} / {self._expression(right)})"
            case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]) if (
                type(op) in BINARY
            ):
                return f"({self._expression(left)} {BINARY[type(op)]} {self._expression(right)})"
            case ast.BoolOp(op=op, values=values):
                return f"({f' {BINARY[type(op)]} '.join(map(self._expression, values))})"
            case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
                return f"({UNARY[type(op)]}{self._expression(operand)})"
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return f"({self._expression(test)} ? {self._expression(body)} : {self._expression(orelse)})"
            case ast.Call(func=function):
                return self._call(node, self._static(function))
        raise self._refuse(node)

    def _call(self, node: ast.Call, function: Any) -> str:
        arguments = [self._expression(argument) for argument in node.args]
        named = {str(keyword.arg): self._expression(keyword.value) for keyword in node.keywords}
        if function is len:
            return f"{arguments[0]}.length"
        if isinstance(function, type) and (fields := getattr(function, "_fields", ())):
            values = {**dict(zip(fields, arguments, strict=False)), **named}
            if set(values) == set(fields):
                return "{" + ", ".join(f"{field}: {value}" for field, value in values.items()) + "}"
        elif not named:
            known = function is not UNKNOWN and function in LIBRARY
            name = LIBRARY[function] if known else self._expression(node.func)
            return f"{name}({', '.join(arguments)})"
        raise self._refuse(node)
