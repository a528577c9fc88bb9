"""`python -m trainer` of somebody in a hurry: `python -m tests.trainer.alone`. What does not get into the store within
a few seconds of the end is not waited for."""

from functools import partial

from trainer.__main__ import main
from trainer.contract.documents import Limits
from trainer.core.process_exit import leave
from trainer.standalone import run as standalone

DRAIN_S = 10.0

if __name__ == "__main__":
    vars(standalone)["Limits"] = partial(Limits, drain_s=DRAIN_S)
    leave(main())
