"""The group of all commands. It imports the module of a command when that command runs, not when help lists it."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from broker.cli.core.exit_codes import BadInput, CliError, not_installed

PYDANTIC = "Value error, "
"""Prefix that pydantic adds to the message of a validator."""


@dataclass(frozen=True)
class Entry:
    """A command, or a group of commands, that is not imported yet."""

    target: str | Mapping[str, str]
    """Function of a command as `module:function`, the module below `LazyGroup.package`; for a group one by member.

    The member "" runs when the group is called without a member.
    """
    summary: str
    """Help text. It equals the docstring of the command's function, which a test checks."""


class PlainCommand(TyperCommand):
    """A command whose help shows no type for options without a value."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))


MEMBERS = (
    ("new", "create", "add", "make"),
    ("ls", "list", "show", "get"),
    ("rm", "delete", "remove", "revoke"),
    ("set", "put", "store", "update"),
)
"""Words for the same action: a group has at most one or two of them as members."""


class PlainGroup(TyperGroup):
    """A group whose help shows no type for options without a value, and which suggests members of the same meaning."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        if args and args[0] not in self.commands and (near := self._same_action(args[0])):
            ctx.fail(f"No such command {args[0]!r}; use `{ctx.command_path} {near}`")
        return super().resolve_command(ctx, args)

    def _same_action(self, word: str) -> str | None:
        """Return a member that other programs call `word`."""
        actions = [action for action in MEMBERS if word in action]
        # A secret is added by `set`, and a token is removed by `revoke`.
        actions += [("set", "create", "add", "new")] if word in ("create", "add", "new", "make") else []
        return next((name for action in actions for name in action if name in self.commands), None)

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))


def _without_flag_types(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class LazyGroup(PlainGroup):
    """The group of all commands. Typer itself prints a usage error to stderr and exits with 2."""

    package: ClassVar[str] = ""
    entries: ClassVar[Mapping[str, Entry]] = {}
    areas: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Commands by the area under which help lists them."""
    synonyms: ClassVar[Mapping[str, str]] = {}
    """Command lines to use in place of an unknown command, by its name."""
    arguments: Sequence[str] = ()

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for area, names in self.areas.items():
            for name in names:
                summary = self.entries[name].summary
                self.add_command(TyperCommand(name, help=summary, rich_help_panel=area), name)

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> Any:
        self.arguments = tuple(args)
        with self._rewording():
            return super().make_context(info_name, args, *more, **extra)

    def invoke(self, ctx: Any) -> Any:
        with self._rewording():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        if args and args[0] in self.synonyms and args[0] not in self.entries:
            ctx.fail(f"No such command {args[0]!r}; use `{self.synonyms[args[0]]}`")
        name, command, rest = super().resolve_command(ctx, args)
        try:
            return name, command if name is None else self.load(name), rest
        except ModuleNotFoundError as e:
            raise self._exit(not_installed(e)) from None
        finally:
            gc.enable()  # `broker.cli.main` disables it for the imports

    def load(self, name: str) -> Any:
        """Import a command or a group and return it. Raises ModuleNotFoundError."""
        entry, parent = self.entries[name], typer.Typer()
        if isinstance(entry.target, str):
            parent.command(name, cls=PlainCommand)(self._function(entry.target))
        else:
            group = typer.Typer(cls=PlainGroup, help=entry.summary, no_args_is_help="" not in entry.target)
            for member, target in entry.target.items():
                add = group.command(member, cls=PlainCommand) if member else group.callback(invoke_without_command=True)
                add(self._function(target))
            parent.add_typer(group, name=name)
        return get_group(parent).commands[name]

    def _function(self, target: str) -> Any:
        module, _, function = target.partition(":")
        return getattr(import_module(f"{self.package}.{module}"), function)

    def _exit(self, error: CliError) -> typer.Exit:
        """Print the error and return the exception that ends the command."""
        from broker.cli.core.output import Output

        Output(as_json=self._writes_json()).error(error)
        return typer.Exit(int(error.code))

    def _writes_json(self) -> bool:
        options = self.arguments[: self.arguments.index("--")] if "--" in self.arguments else self.arguments
        return "--json" in options

    @contextmanager
    def _rewording(self) -> Iterator[None]:
        try:
            yield
        except typer.TyperException as e:
            e.message = e.message.removeprefix(PYDANTIC) + _hint(e)
            if self._writes_json():
                from broker.cli.core.output import write_error

                write_error(BadInput(e.format_message()))
            raise


def _hint(error: typer.TyperException) -> str:
    """Return a hint for an option of the remote program that was given to `exec` without `--`."""
    where = getattr(getattr(error, "ctx", None), "command_path", "")
    if where.endswith(" exec") and error.message.startswith("No such option"):
        return "; write -- before the program and its options: gpubroker exec JOB -- PROGRAM OPTIONS"
    return ""
