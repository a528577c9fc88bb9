"""The dead-man's switch as a pure rule: how long has the broker's lease stood still while it could be read?"""


class DeadMan:
    """Fed with every look at `broker/lease`; times are seconds of the observer's monotonic clock.

    Only time between two looks that both succeeded counts: a lease that cannot be read is unknown, not stale.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._value: bytes | None = None
        self._looked_at: float | None = None
        self._stale_s = 0.0

    def seen(self, value: bytes | None, now: float) -> None:
        """The lease was read (None: there is none)."""
        if self._looked_at is not None:
            self._stale_s = self._stale_s + now - self._looked_at if value == self._value else 0.0
        self._value, self._looked_at = value, now

    def unreadable(self) -> None:
        """The store could not be asked."""
        self._looked_at = None

    @property
    def stale_s(self) -> float:
        return self._stale_s

    @property
    def expired(self) -> bool:
        """True once the lease stood still for the limit; a limit of 0 means never."""
        return 0 < self._limit_s <= self._stale_s
