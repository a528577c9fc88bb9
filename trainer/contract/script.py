"""`ScriptConfig`: the user's own program of a script job, and how its environment is prepared."""

import re
import shlex
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from trainer.contract.base import Config, InSeconds, Text, matching

SHELL_CHARACTERS = frozenset("\n\r();<>|&$`*?[{~#")
"""Characters that have a meaning to a shell, outside quotes."""
SHELL_WORDS = frozenset({
    "!", ".", ":", "[[", "alias", "bg", "break", "builtin", "case", "cd", "command", "continue", "coproc", "declare",
    "dirs", "disown", "enable", "eval", "exec", "exit", "export", "fg", "for", "function", "getopts", "hash",
    "history", "if", "jobs", "let", "local", "logout", "popd", "pushd", "read", "readonly", "return", "select", "set",
    "shift", "shopt", "source", "suspend", "time", "times", "trap", "type", "typeset", "ulimit", "umask", "unalias",
    "unset", "until", "wait", "while",
})  # fmt: skip
"""First words of a line that only a shell understands."""
_QUOTED = re.compile(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.", re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(\[.*\])?\+?=")


def _within_code(path: str) -> str:
    """Refuse a path that leaves the code folder."""
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError("must be a file within the code folder, such as requirements.txt")
    return path


ImageReference = Annotated[
    str,
    matching(
        r"^[a-z0-9]+([._-]+[a-z0-9]+)*(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
        r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?$",
        "must be a container image such as pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime",
        max_length=512,
    ),
]
RequirementsFile = Annotated[Text, Field(min_length=1, max_length=1024), AfterValidator(_within_code)]
Command = Annotated[Text, Field(min_length=1, max_length=8192)]


def _no_shell_line(command: Any) -> Any:
    """Refuse a line, because only a shell knows its words. Clients split simple lines before."""
    if isinstance(command, str):
        raise ValueError(
            'must be a list such as [a, b]; for a shell (several lines, |, $, *, cd, A=1) write [bash, -c, "…"], '
            "and quote such a character that is meant literally"
        )
    return tuple(command) if isinstance(command, list) else command  # strict JSON has lists only


class ScriptConfig(Config):
    """Folder or archive with an argument list, never a shell string.

    Files in `$GPUBROKER_CHECKPOINT_DIR` are committed, and restored before the next start. On several machines only
    the first machine's files are saved; all machines get them back.
    """

    code: Annotated[Text, Field(min_length=1, max_length=1024)]
    """Folder (packed by the CLI), or `upload:<sha256>` of a .tar for the API."""
    command: Annotated[
        tuple[Annotated[Text, Field(max_length=8192)], ...],
        Field(min_length=1, max_length=256),
        BeforeValidator(_no_shell_line),
    ]
    """Program and arguments, for example `[python, train.py, --lr, "1e-4"]`. The command line and the Python client
    also take one line, `python train.py --lr 1e-4`, without a shell's syntax; with it write `[bash, -c, "…"]`.
    """
    image: ImageReference | None = None
    """A public container image with bash and Python 3.11 or newer, whose user is root, such as
    `pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime`. RunPod and Vast run it, and the agent is installed into it; offers
    of other providers are dropped. Absent: the daemon's image. A digest (`@sha256:…`) keeps it the same.
    """
    requirements: RequirementsFile | None = None
    """A requirements file within the code folder, such as `requirements.txt`. Before `setup`, pip, or uv where pip is
    missing, installs its packages into an environment of the job's own. `python` on the PATH is then the environment's.
    Packages of the image or the machine, such as torch, stay visible.
    """
    setup: Annotated[tuple[Command, ...], Field(max_length=64)] = ()
    """Lines for bash, run in order in the code folder with the program's variables before each start of the program,
    also after a preemption. A line that fails ends the job, without another attempt. Processes that a line leaves are
    ended.
    """
    setup_timeout_s: Annotated[int, Field(ge=1, le=86_400), InSeconds] = 1800
    """Most time for `requirements` and `setup` together on a machine, as seconds or `30m`; then the job fails."""
    checkpoints: bool = True
    """`false`: the program writes no checkpoints, so a preemption loses everything and no spot machine is bought for
    it.
    """


def line_words(line: str) -> list[str] | None:
    """Return the words of a line that means the same without a shell, otherwise None."""
    line = line.strip(" \t\r\n")
    bare = _QUOTED.sub(_unquoted, line)
    if SHELL_CHARACTERS.intersection(bare) or _ASSIGNMENT.match(bare):
        return None
    try:
        words = shlex.split(line)
    except ValueError:  # a quotation without its end
        return None
    return words if words and words[0] not in SHELL_WORDS else None


def _unquoted(quoted: re.Match[str]) -> str:
    """Return the characters of a quoted text that keep their meaning to a shell, after a quotation mark."""
    text = quoted[0]
    if text.startswith('"'):
        return '"' + "".join(re.findall(r"[$`]|(?<=\\)\n", text))
    return "\n" if text == "\\\n" else '"'
