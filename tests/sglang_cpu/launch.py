"""The real SGLang server, unmodified, on a machine without a GPU: `python launch.py --model-path DIR --port 30000 ...`.

SGLang can compute with torch alone (torch_native attention, pytorch sampling), but on its way there it imports three
packages that have no build for a plain CPU, and then calls nothing of them:

- torchvision: the configurations of vision models name it; the wheel is compiled against a CUDA build of torch.
- triton: kernels are declared with @triton.jit, and never launched.
- sgl_kernel: compiled for CUDA only; SGLANG_USE_CPU_ENGINE=1 keeps SGLang from calling it.

So an import hook answers for these three with empty modules, in which every name exists: a capitalised one is a class,
another one a decorator that changes nothing. What would compute (sgl_kernel) raises when it is called, so that no
stand-in answers silently. SGLang starts its workers by spawning, which imports the main module
again: that is why the hook is installed at the top level and reaches every process.

--exit-with-parent is ours: the server ends, with all its workers, when standard input is closed.
"""

import importlib.abc
import importlib.machinery
import os
import signal
import sys
import threading
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
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of OpenMP on shared cores wait for each other
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Anything(type):
    """The class of stand-in classes: each takes any arguments and has every attribute, which is None."""

    def __call__(cls, *_: Any, **__: Any) -> Any:
        return cls.__new__(cls)

    def __getattr__(cls, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class StandIn(ModuleType):
    """A module, or a name in one, that can be imported, subclassed and used as a decorator, and nothing else."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        whole = f"{self.__name__}.{name}"
        made = Anything(name, (), {"__module__": self.__name__}) if name[0].isupper() else StandIn(whole)
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.__name__.startswith("sgl_kernel"):
            raise NotImplementedError(f"{self.__name__} is not here: its place is held for the import only")
        if len(args) == 1 and callable(args[0]) and not options:
            return args[0]  # @decorator
        return lambda function: function  # @decorator(options), constexpr(8)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for the absent packages and all that is in them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, Finder())


def end_with_parent() -> None:
    """Wait for the end of standard input, then end this process's whole session."""
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def main(argv: list[str]) -> None:
    if "--exit-with-parent" in argv:
        argv.remove("--exit-with-parent")
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)  # a group of its own, which ends as one
        threading.Thread(target=end_with_parent, daemon=True).start()
    for name, value in DEFAULTS.items():
        if name not in argv:
            argv += [name, value]
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args([*argv, *FLAGS]))


if __name__ == "__main__":
    main(sys.argv[1:])
