"""Numbers as the verdict and the tables say them."""

from collections.abc import Sequence

from paceline.training.clock import VIRTUAL

ITERATIONS = {"update": "global updates", "gradient": "gradients applied", "round": "rounds"}
_MINUTE_S, _HOUR_S = 60, 3600


def duration(value_s: float, engine: str) -> str:
    """As `seconds`, with the clock where it is none of the real ones.

    >>> duration(4.25, "virtual")
    '4.2 s of virtual time'
    """
    return seconds(value_s) + (" of virtual time" if engine == VIRTUAL else "")


def seconds(value_s: float) -> str:
    """A duration to about three digits.

    >>> [seconds(value) for value in (0.0423, 4.25, 42.4, 200, 4000)]
    ['0.042 s', '4.2 s', '42 s', '3 min 20 s', '1 h 7 min']
    """
    if value_s < 0.95:
        return f"{value_s:.2g} s"
    if value_s < 9.95:
        return f"{value_s:.1f} s"
    whole_s = round(value_s)
    if whole_s < 2 * _MINUTE_S:
        return f"{whole_s} s"
    if whole_s < _HOUR_S:
        return f"{whole_s // _MINUTE_S} min {whole_s % _MINUTE_S} s"
    whole_min = round(value_s / _MINUTE_S)
    return f"{whole_min // 60:,} h {whole_min % 60} min"


def ratio(value: float) -> str:
    """
    >>> [ratio(value) for value in (0.8312, 4.06, 12.34)]
    ['0.83', '4.1', '12.3']
    """
    return f"{value:.2f}" if value < 1 else f"{value:.1f}"


def percent(value: float) -> str:
    """
    >>> percent(0.3141), percent(-0.001)
    ('31 %', '0 %')
    """
    return f"{round(value * 100)} %"


def quantity(value: float) -> str:
    """
    >>> [quantity(value) for value in (0.04234, 42.42, 12345.6)]
    ['0.0423', '42.4', '12,346']
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


def servers(count: int) -> str:
    return f"{count} server{'' if count == 1 else 's'}"


def combination(strategy: str, count: int) -> str:
    """
    >>> combination("ps-bsp:servers=2", 4)
    'ps-bsp:servers=2 on 4 workers'
    """
    return f"{strategy} on {workers(count)}"


def listed(parts: Sequence[str], *, most: int | None = None) -> str:
    """
    >>> listed(["a", "b", "c"])
    'a, b and c'
    >>> listed(["a", "b", "c"], most=1)
    'a and 2 more'
    """
    if most is not None and len(parts) > most:
        parts = [*parts[:most], f"{len(parts) - most} more"]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
