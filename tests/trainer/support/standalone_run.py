"""`python -m tests.trainer.support.standalone_run`: `python -m trainer` with short timeouts.

Uploads that take more than a few seconds at the end are not awaited."""

from functools import partial

from trainer.__main__ import main
from trainer.contract.documents import Limits
from trainer.core.errors import leave
from trainer.standalone import run as standalone

DRAIN_S = 10.0

if __name__ == "__main__":
    vars(standalone)["Limits"] = partial(Limits, drain_s=DRAIN_S)
    leave(main())
