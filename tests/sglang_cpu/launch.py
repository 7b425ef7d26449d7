"""Run the unmodified SGLang server without a GPU: `python launch.py --model-path DIR --port 30000`.

With attention by torch_native and sampling by pytorch, SGLang computes with torch alone. But even
then it imports three packages that have no build for a plain CPU: torchvision (for vision models),
triton (it declares kernels, and launches none) and sgl_kernel (with SGLANG_USE_CPU_ENGINE=1 it
calls none). An import hook replaces each by a stand-in, in which every name exists: a capitalised
name is a class, any other a decorator that returns its function. A call of sgl_kernel is an error,
and never a wrong result. The hook is set at the top level, because each worker of SGLang is a
spawned process that imports this module.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any

ABSENT = ("torchvision", "triton", "sgl_kernel")
DEFAULTS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--mem-fraction-static": "0.05",
    "--weight-version": "0",
    "--host": "127.0.0.1",
    "--log-level": "warning",
}
FLAGS = ("--disable-cuda-graph", "--disable-overlap-schedule")

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
# More OpenMP threads than cores would slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Anything(type):
    """The metaclass of stand-in classes. A stand-in class accepts any arguments, and every
    attribute of the class is None."""

    def __call__(cls, *_: Any, **__: Any) -> Any:
        return cls.__new__(cls)

    def __getattr__(cls, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class StandIn(ModuleType):
    """A stand-in for a module or for a name in a module. Code can import a stand-in and use it as a
    decorator."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        whole = f"{self.__name__}.{name}"
        made = (
            Anything(name, (), {"__module__": self.__name__})
            if name[0].isupper()
            else StandIn(whole)
        )
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.__name__.startswith("sgl_kernel"):
            raise NotImplementedError(
                f"{self.__name__} is a stand-in that can only be imported, because sgl_kernel has no build for a CPU"
            )
        if len(args) == 1 and callable(args[0]) and not options:
            return args[0]  # @decorator
        return lambda function: function  # @decorator(options), constexpr(8)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import hook that makes a stand-in for each package in ABSENT and for each module of these
    packages."""

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, Finder())


def main(argv: list[str]) -> None:
    for name, value in DEFAULTS.items():
        if name not in argv:
            argv += [name, value]
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args([*argv, *FLAGS]))


if __name__ == "__main__":
    main(sys.argv[1:])
