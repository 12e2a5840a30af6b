"""The speed-up over numbers of map tasks, as SVG text, without a plotting library."""

from collections.abc import Mapping

_WIDTH, _HEIGHT, _MARGIN = 560, 380, 60
_MEASURED, _IDEAL = "#0072b2", "#999999"


def speedup_chart(speedups: Mapping[int, float]) -> str:
    """A document with the measured speed-up over serial descent, and the line on which it equals the tasks."""
    numbers = sorted(speedups)
    most = numbers[-1]
    top = max(most, *speedups.values())

    def at(number: float, speedup: float) -> tuple[float, float]:
        x = _MARGIN + number / most * (_WIDTH - 2 * _MARGIN)
        return round(x, 1), round(_HEIGHT - _MARGIN - speedup / top * (_HEIGHT - 2 * _MARGIN), 1)

    (left, bottom), (right, _), (_, upper) = at(0, 0), at(most, 0), at(0, top)
    (end_x, end_y), (label_x, label_y) = at(most, most), at(most, speedups[most])
    measured = " ".join(f"{x},{y}" for x, y in (at(number, speedups[number]) for number in numbers))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<path d="M{left},{upper} V{bottom} H{right}" fill="none" stroke="#333333"/>',
        f'<path d="M{left},{bottom} L{end_x},{end_y}" stroke="{_IDEAL}" stroke-dasharray="5 4"/>',
        f'<polyline points="{measured}" fill="none" stroke="{_MEASURED}" stroke-width="2"/>',
        f'<text x="{end_x}" y="{end_y - 8}" text-anchor="end" fill="{_IDEAL}">as many times as tasks</text>',
        f'<text x="{label_x + 6}" y="{label_y + 4}" fill="{_MEASURED}">{speedups[most]:.2f}</text>',
        f'<text x="{(left + right) / 2}" y="{bottom + 40}" text-anchor="middle">map tasks</text>',
        f'<text x="{left}" y="{upper - 24}">speed-up over serial descent (axis to {top:g})</text>',
    ]
    for number in numbers:
        x, y = at(number, speedups[number])
        parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{_MEASURED}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 20}" text-anchor="middle">{number}</text>')
    return "\n".join([*parts, "</svg>", ""])
