"""The errors that cross the rooms of the house.

GpubrokerError
├── ProviderError            a cloud answered, or did not
│   ├── NoCapacity           definitely nothing was created: sold out
│   ├── Rejected             definitely nothing was created: the request, quota or credential is at fault
│   │   └── ImageRefused     the trainer's image cannot be pulled
│   ├── Throttled            definitely nothing was done; ask again after `after_s`
│   ├── Gone                 the instance does not exist (any more)
│   └── OutcomeUnknown       everything else: it may or may not have happened
├── StoreError
│   ├── IdempotencyConflict  the key was used with another body
│   ├── InUse                other rows need it: it is not deleted
│   ├── OriginDeleted        the checkpoints that a new job starts from are deleted
│   ├── SchemaNewer          a newer gpubroker has migrated the database: this process must end
│   └── StoreUnavailable     the database cannot be reached, or a commit's fate is unknown
├── BlobError
│   ├── AlreadyExists        put-if-absent found something
│   └── BlobsUnavailable     the blob store cannot be reached; nothing is known about its objects
├── NotifyError              a channel did not take a delivery
│   ├── NotDelivered         it may or may not have been told; told again later
│   ├── RetryAfter           the receiver asks for a pause of the whole channel of `after_s`
│   ├── Undeliverable        this one is never taken: left out, and counted under `reason`
│   └── ChannelRefused       the receiver wants nothing any more: the channel is disabled
├── OverBudget               a policy does not allow it now; the message says which and why
└── InvalidInput             a person's input is at fault: `problems` name the places and the fixes
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class GpubrokerError(Exception):
    """Base of all; the message is one line: what, where and the fix."""


class ProviderError(GpubrokerError):
    """A cloud's refusal or silence."""


class NoCapacity(ProviderError):
    """Definitely nothing was created."""


class Rejected(ProviderError):
    """Definitely nothing was created, and asking the same again cannot help."""


class ImageRefused(Rejected):
    """The registry does not hand out the trainer's image: nobody else will pull it either."""


class Throttled(ProviderError):
    """Definitely nothing was done."""

    def __init__(self, message: str, after_s: float = 5.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class Gone(ProviderError):
    """The cloud says that the instance is absent."""


class OutcomeUnknown(ProviderError):
    """A time-out, a lost reply, an unclassified error: it may have happened."""


class StoreError(GpubrokerError):
    """The database refused."""


class IdempotencyConflict(StoreError):
    """One idempotency key, another body."""


class InUse(StoreError):
    """Other rows need it."""


class OriginDeleted(StoreError):
    """What a new job starts from is gone."""


class SchemaNewer(StoreError):
    """This process does not know the rules of the database any more: whatever it does there may be wrong."""


class StoreUnavailable(StoreError):
    """No answer, or a commit whose fate is unknown: re-read before doing anything."""


class BlobError(GpubrokerError):
    """The blob store refused."""


class AlreadyExists(BlobError):
    """Put-if-absent found an object."""


class BlobsUnavailable(BlobError):
    """Unreadable is not stale: nothing is known."""


class NotifyError(GpubrokerError):
    """A channel did not take a delivery. `state` is kept for the stream, unless None: what was done nevertheless."""

    def __init__(self, message: str, *, state: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.state = state


class NotDelivered(NotifyError):
    """Told again later, with the same id."""


class RetryAfter(NotifyError):
    """Definitely not taken; the receiver says when to come back (seconds)."""

    def __init__(self, message: str, after_s: float, *, state: Mapping[str, Any] | None = None) -> None:
        super().__init__(message, state=state)
        self.after_s = after_s


class Undeliverable(NotifyError):
    """This delivery will never be taken, others may. `reason`: a few constant words to count it under."""

    def __init__(self, message: str, reason: str, *, state: Mapping[str, Any] | None = None) -> None:
        super().__init__(message, state=state)
        self.reason = reason


class ChannelRefused(NotifyError):
    """The receiver is gone, or its credentials are: only a person can mend it."""


class OverBudget(GpubrokerError):
    """A policy does not allow it now."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One fault in an input: `field` as a dotted path (`train.data.prompt`), `message` says what and the fix."""

    field: str
    message: str


class InvalidInput(GpubrokerError):
    """A spec, a data set or a parameter is at fault."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(f"{p.field}: {p.message}" for p in problems))
        self.problems = problems
