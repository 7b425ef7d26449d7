"""A stand-in for flashinfer and for xgrammar, whose names SGLang imports on every NVIDIA GPU. With
--attention-backend triton, --sampling-backend pytorch and --grammar-backend none SGLang uses none
of them. Every name is an empty class, and a call raises an error."""

import importlib.abc
import importlib.machinery
import sys

PREFIX = __name__


def missing(module):
    def get(name):
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(self, *args, **kwargs):
            raise RuntimeError(f"{module} is only a stand-in here, but {name} was called")

        return type(name, (), {"__init__": refuse, "__module__": module})

    return get


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name == PREFIX + ".norm":  # sgl_kernel would call it in place of its own RMSNorm
            raise ModuleNotFoundError(name)
        if name.startswith(PREFIX + "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = missing(module.__name__)


sys.meta_path.append(Finder())
__version__ = "0.0.0"
__getattr__ = missing(PREFIX)

from pydantic import BaseModel  # noqa: E402


class StructuralTag(BaseModel):
    """SGLang uses this name in annotations of its requests."""
