"""Makes a process that only traces start fast: what is imported and never run looks absent, or is an empty stand-in.

Of importing torch, transformers, peft and accelerate more than half goes into such things.
"""

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata, util
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

UNUSED = (
    *("bitsandbytes", "boto3", "botocore", "datasets", "pandas", "scipy", "sklearn", "tensorboard"),
    *("torchao", "torchaudio", "torchvision"),
)
"""Of transformers, peft and accelerate, which do without."""
READ_IN = "2.13."
"""The torch whose code was read for what its parts below are used for; of others they are imported as they are."""
WHOLE = "GPUBROKER_TRACER_WHOLE"
"""Set where a stand-in was not enough."""
EMPTY = (
    *("torch.distributed.fsdp", "torch.distributed._composable.fsdp", "torch.distributed.tensor"),
    *("torch.distributed.tensor._utils", "torch.distributed.tensor.placement_types"),
    "torch._dynamo._trace_wrapped_higher_order_op",
)
"""Divided tensors and masks for a compiler: asked for types, of which a single process has none. Sympy is theirs."""


class Lacking(Exception):
    """A stand-in was asked for what it does not have: see `start_over`."""


class _Some(ModuleType):
    """Has what it was given."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # a package, whose parts are stand-ins too

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Lacking(f"{self.__name__}.{name}")


class _Empty(_Some):
    """Has every public name: a class of its own, of which nothing is an instance."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": _nothing})
        setattr(self, name, made)
        return made


def _as_it_is(function: Any = None, *_: Any, **__: Any) -> Any:
    """What a decorator does that has nothing to do, with or without arguments."""
    return function if callable(function) else _as_it_is


def _nothing(*_: Any, **__: Any) -> None:
    """What a call does that only tells a compiler something."""


def _no_compiler() -> ModuleType:
    """torch's, as far as eager code asks for it: checkpointing and optimizers, to be left alone."""
    made = _Some("torch._dynamo")
    decorators: dict[str, Callable[..., Any]] = dict.fromkeys(
        ("allow_in_graph", "assume_constant_result", "disable"), _as_it_is
    )
    vars(made).update(decorators, graph_break=_nothing, config=SimpleNamespace(error_on_nested_fx_trace=True))
    return made


def _no_symbols() -> tuple[ModuleType, ModuleType]:
    """Sympy, of whose expressions no size is one, and torch's own functions of such."""
    sympy, functions = _Some("sympy"), _Some("torch.utils._sympy.functions")
    vars(sympy).update(Basic=type("Basic", (), {}))
    vars(functions).update(Max=max)
    return sympy, functions


def _plain_numbers() -> ModuleType:
    """What torch asks of sizes that may be symbols, for numbers; sympy is behind the real one."""
    made = _Some("torch.fx.experimental.symbolic_shapes")
    itself = ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "guarding_hint_or_throw")
    vars(made).update(
        dict.fromkeys((*itself, "statically_known_true"), lambda value: value),
        **dict.fromkeys(("has_free_symbols", "is_nested_int", "is_symbolic"), lambda value: False),
        has_guarding_hint=lambda value: True,
        optimization_hint=lambda value, fallback=None: value,
        free_unbacked_symbols=lambda value: set(),
        _constrain_range_for_size=_nothing,
        sym_and=lambda *values: all(values),
        sym_or=lambda *values: any(values),
        sym_eq=lambda x, y: list(x) == list(y) if isinstance(x, (list, tuple)) else x == y,
    )
    return made


def _models() -> ModuleType:
    """transformers' package of all models without its table of their names, which takes 0.2 s to be made."""
    made = ModuleType("transformers.models")
    found = util.find_spec("transformers")
    roots = (found and found.submodule_search_locations) or ()
    made.__path__ = [f"{root}/models" for root in roots]
    return made


def shut_out() -> None:
    """Before the first import of these; for the rest of the process. Collects no garbage until `ready`."""
    gc.disable()
    for name in UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # which import reads as: not to be had
    if WHOLE not in os.environ and metadata.version("torch").startswith(READ_IN):
        for made in (_no_compiler(), *_no_symbols(), _plain_numbers(), _models(), *map(_Empty, EMPTY)):
            sys.modules.setdefault(made.__name__, made)


def ready() -> None:
    """All is imported: parents know their parts by name, and garbage is collected again, of what comes from now on."""
    with contextlib.suppress(ImportError):  # what the stand-in of symbolic sizes would have imported
        importlib.import_module("torch.fx.experimental._config")
    for name in EMPTY:
        parent, _, own = name.rpartition(".")
        if isinstance(part := sys.modules.get(name), _Empty) and parent in sys.modules:
            setattr(sys.modules[parent], own, part)
    gc.freeze()
    gc.enable()


def start_over(arguments: Sequence[str]) -> NoReturn:
    """This process again, with all that there is."""
    os.environ[WHOLE] = "1"
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "trainer.memtrace", *arguments])
