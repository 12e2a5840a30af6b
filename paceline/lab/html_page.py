"""A page with figures as one HTML file: templates, the style and the code that they share, and what is safe in them."""

import json
import math
from collections.abc import Mapping
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from paceline.lab.figures.chart import Chart


def render(template: str, *, package: str, plots: Mapping[str, Any], context: Mapping[str, Any]) -> str:
    """A template from the folder `page` of a package, with plotly's figures as plain data by the id of their element.
    Names from outside are shown as text, never taken as markup."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package, "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    parts = {
        "version": version("paceline"),
        "charts_json": _script_safe(json.dumps(plots, separators=(",", ":"), allow_nan=False)),
        "style": Markup(_part("report.css")),
        "script_js": Markup(_part("report.js")),
        "plotly_js": Markup(get_plotlyjs()),
    }
    return environment.get_template(template).render({**parts, **context})


def chart_view(chart: Chart) -> dict[str, Any]:
    """What templates say of a chart: its description, its notes, and its numbers as a table."""
    return {
        "alternative": chart.alternative,
        "notes": chart.notes,
        "height_px": chart.plot.layout.height,
        "headings": list(chart.table.columns),
        "rows": [[_cell(value) for value in row] for row in chart.table.itertuples(index=False)],
    }


def _cell(value: object) -> str:
    """A number as tables under charts show it."""
    if isinstance(value, float):
        if math.isnan(value):
            return "–"
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return str(value)


def _part(name: str) -> str:
    return files("paceline.lab").joinpath("page", name).read_text(encoding="utf-8")


def _script_safe(text: str) -> Markup:
    """JSON that cannot end the script element which holds it."""
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))
