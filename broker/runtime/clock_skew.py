"""When a host's wall clock is wrong, as measured by the database's."""

MOST_S = 5.0


def skewed(skew_s: float) -> str | None:
    """What is wrong with a wall clock that is `skew_s` ahead (negative: behind), in one line; None: nothing."""
    if abs(skew_s) <= MOST_S:
        return None
    where = "ahead of" if skew_s > 0 else "behind"
    return (
        f"this host's clock is {abs(skew_s):.0f} s {where} the database's, which is the one that counts; set it right "
        "(timedatectl set-ntp true): clouds refuse requests that are signed at a wrong time"
    )
