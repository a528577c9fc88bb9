"""Errors that cross package boundaries.

GpubrokerError
├── ProviderError            a cloud refused, or did not answer
│   ├── NoCapacity           nothing was created: sold out
│   ├── Rejected             nothing was created: the request, quota or credential is at fault
│   │   └── ImageRefused     the registry refuses the trainer's image
│   ├── Throttled            nothing was done; ask again after `after_s` seconds
│   ├── Gone                 the instance does not exist, or no longer exists
│   └── OutcomeUnknown       any other error: the call may or may not have taken effect
├── StoreError
│   ├── IdempotencyConflict  the key was used with another request body
│   ├── StaleVersion         the row has another version than the one that the caller replaces
│   ├── InUse                other rows need this row: it is not deleted
│   ├── OriginDeleted        the checkpoints that a new job starts from are deleted
│   ├── SchemaNewer          a newer gpubroker has migrated the database: this process must end
│   └── StoreUnavailable     the database cannot be reached, or a commit's outcome is unknown
├── BlobError
│   ├── AlreadyExists        put-if-absent met an existing object
│   └── BlobsUnavailable     the blob store cannot be reached; the state of its objects is unknown
│       └── BlobTooLarge     the object has more bytes than its reader accepts; it was not read
├── NotifyError              a channel did not accept a delivery
│   ├── NotDelivered         the delivery may or may not have arrived; it is repeated later
│   ├── RetryAfter           the receiver asks to pause the whole channel for `after_s` seconds
│   ├── Undeliverable        this delivery is never accepted: skipped, and counted under `reason`
│   └── ChannelRefused       the receiver refuses all deliveries: the channel is disabled
├── Busy                     a computation did not end in time; the same call may succeed later
├── OverBudget               a policy forbids it now; the message names the policy and the reason
└── InvalidInput             a user's input is at fault: `problems` name the places and the fixes
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class GpubrokerError(Exception):
    """Base of all errors; the message is one line with the place, the fault and the fix."""


class ProviderError(GpubrokerError):
    """A cloud refused a call or did not answer."""


class NoCapacity(ProviderError):
    """Nothing was created because the offer is sold out."""


class Rejected(ProviderError):
    """Nothing was created, and the same request cannot succeed."""


class ImageRefused(Rejected):
    """The registry refuses the trainer's image, so no machine can pull it."""


class Throttled(ProviderError):
    """Nothing was done because the cloud limits the rate of calls; `after_s`: seconds to wait."""

    def __init__(self, message: str, after_s: float = 5.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class Gone(ProviderError):
    """The cloud reports that the instance is absent."""


class OutcomeUnknown(ProviderError):
    """A time-out, a lost reply or an unclassified error: the call may have taken effect."""


class StoreError(GpubrokerError):
    """The database refused an operation."""


class IdempotencyConflict(StoreError):
    """The idempotency key was used before with another request body."""


class StaleVersion(StoreError):
    """The row has another version than the one that the caller replaces; nothing was written."""


class InUse(StoreError):
    """Other rows refer to the row that was to be deleted."""


class OriginDeleted(StoreError):
    """The checkpoints that a new job starts from are deleted."""


class SchemaNewer(StoreError):
    """The database schema is newer than this process, so that every further write may be wrong."""


class StoreUnavailable(StoreError):
    """The database did not answer, or a commit's outcome is unknown: read again before any action."""


class BlobError(GpubrokerError):
    """The blob store refused an operation."""


class AlreadyExists(BlobError):
    """Put-if-absent met an existing object."""


class BlobsUnavailable(BlobError):
    """The blob store cannot be read; its objects may be fresh."""


class BlobTooLarge(BlobsUnavailable):
    """The object has more bytes than its reader accepts, so its content is unknown. Its writer is at fault."""


class NotifyError(GpubrokerError):
    """A channel did not accept a delivery.

    `state`: delivery state to store for the stream, if part of the work was done; None: leave it unchanged.
    """

    def __init__(self, message: str, *, state: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.state = state


class NotDelivered(NotifyError):
    """The delivery is repeated later with the same id."""


class RetryAfter(NotifyError):
    """The delivery was not accepted; the receiver asks for a pause of `after_s` seconds."""

    def __init__(self, message: str, after_s: float, *, state: Mapping[str, Any] | None = None) -> None:
        super().__init__(message, state=state)
        self.after_s = after_s


class Undeliverable(NotifyError):
    """Permanent refusal of one delivery; others may be accepted.

    `reason`: a few constant words under which it is counted.
    """

    def __init__(self, message: str, reason: str, *, state: Mapping[str, Any] | None = None) -> None:
        super().__init__(message, state=state)
        self.reason = reason


class ChannelRefused(NotifyError):
    """The receiver is gone or its credentials are invalid: a user must repair the channel."""


class Busy(GpubrokerError):
    """A computation did not end within its deadline; nothing was done."""


class OverBudget(GpubrokerError):
    """A policy forbids the operation now."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One fault in an input.

    `field`: dotted path, e.g. `train.data.prompt`. `message`: the fault and the fix.
    """

    field: str
    message: str


class InvalidInput(GpubrokerError):
    """A spec, a data set or a parameter is at fault."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(f"{p.field}: {p.message}" for p in problems))
        self.problems = problems
