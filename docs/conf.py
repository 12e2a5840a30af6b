"""The documentation site: `make docs` builds it, and a warning fails the build."""

import sys
from importlib.metadata import version
from pathlib import Path

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE))

project = "Paceline"
copyright = "the authors of Paceline, Apache-2.0"
version = release = version("paceline")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "site_reports"]
exclude_patterns = ["_build", "design/STATUS.md"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "code"  # docstrings name code in single backticks
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 100

html_theme = "furo"
html_title = "Paceline"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
# The report's colours, light and dark: paceline/lab/page/report.css.
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0b5cad",
        "color-brand-content": "#0b5cad",
        "color-brand-visited": "#5b4bb7",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7db4ec",
        "color-brand-content": "#7db4ec",
        "color-brand-visited": "#a99bf2",
    },
}
