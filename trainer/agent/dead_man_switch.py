"""Dead-man's switch as a pure rule on how long the broker's lease stayed unchanged while it was readable."""


class DeadMan:
    """Timer of the broker's lease, updated at every poll of `broker/lease`.

    Times are seconds of the observer's monotonic clock. Only time between two successful reads counts: an
    unreadable lease is unknown, not stale.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._value: bytes | None = None
        self._read_at: float | None = None
        self._stale_s = 0.0

    def observe(self, value: bytes | None, now: float) -> None:
        """Record a read of the lease (None: it does not exist)."""
        if self._read_at is not None:
            self._stale_s = self._stale_s + now - self._read_at if value == self._value else 0.0
        self._value, self._read_at = value, now

    def unreadable(self) -> None:
        """Record that the store could not be reached."""
        self._read_at = None

    @property
    def stale_s(self) -> float:
        return self._stale_s

    @property
    def expired(self) -> bool:
        """True once the lease stayed unchanged for the limit; a limit of 0 means never."""
        return 0 < self._limit_s <= self._stale_s
