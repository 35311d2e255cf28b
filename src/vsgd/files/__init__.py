"""Linear models on files of any size: `vsgd fit`, `vsgd predict` and `vsgd score` read them in chunks."""

from vsgd.files.commands import add_commands

__all__ = ["add_commands"]
