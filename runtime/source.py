"""Import a plan's model.py: always the text that lies there."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType


class _UncachedLoader(SourceFileLoader):
    """Keeps no bytecode and trusts none: Python tells files by second and size, which an edit may share."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def import_source(path: Path, name: str) -> ModuleType:
    """The module in a file, under a name of its own; tracebacks show the file."""
    spec = importlib.util.spec_from_file_location(name, path, loader=_UncachedLoader(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
