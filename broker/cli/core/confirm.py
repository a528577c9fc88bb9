"""A question before what cannot be taken back."""

import typer

from broker.cli.core.command import interruptible
from broker.cli.core.exit_codes import BadInput, Refused
from broker.cli.core.output import Output


def confirm(out: Output, question: str, *, yes: bool, to: str, else_: str) -> None:
    """`to`: what is done without a question; `else_`: what to tell who says no.

    Raises Refused when the person says no, BadInput when there is nobody to ask.
    """
    if yes:
        return
    if not out.asks:
        raise BadInput(f"there is nobody to ask for confirmation; add -y to {to} without a question")
    with interruptible():
        agreed = typer.confirm(question, default=False)
    if not agreed:
        raise Refused(else_)
