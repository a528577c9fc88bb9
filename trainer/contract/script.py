"""`ScriptConfig`: the user's own program, run by the same agent with the same heartbeats, drain and caps."""

from typing import Annotated

from pydantic import Field

from trainer.contract.base import Config, Text


class ScriptConfig(Config):
    """Folder or archive with an argument list, never a shell string.

    Files in `$GPUBROKER_CHECKPOINT_DIR` are committed, and restored before the next start. On several machines only
    the first machine's files are saved; all machines get them back.
    """

    code: Annotated[Text, Field(min_length=1, max_length=1024)]
    """Folder (packed by the CLI), or `upload:<sha256>` of a .tar for the API."""
    command: Annotated[tuple[Annotated[Text, Field(max_length=8192)], ...], Field(min_length=1, max_length=256)]
    """Program and arguments, for example `[python, train.py, --lr, "1e-4"]`."""
    checkpoints: bool = True
    """`false`: the program writes no checkpoints, so a preemption loses everything and no spot machine is bought for
    it.
    """
