"""The directive `report`: what a study in docs/gallery says, and its report, made anew with the site.

A study is kept as `study.json` and its tables. The directive's text is the study's name, or several names, which are
then side by side in one report.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from paceline.lab import report_page
from paceline.lab.study import Study

GALLERY = Path(__file__).parent / "gallery"
REPORTS = "reports"


class Report(Directive):
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        names = self.arguments[0].split()
        directories = [GALLERY / name for name in names]
        environment = self.state.document.settings.env
        for directory in directories:
            environment.note_dependency(str(directory / "study.json"))
        file = f"{'-and-'.join(names)}.html"
        studies = [Study.open(directory) for directory in directories]
        path = Path(environment.app.outdir) / REPORTS / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(report_page.render([report_page.page_of(study) for study in studies]), encoding="utf-8")
        said = nodes.bullet_list()
        for study in studies:
            text = f"{study.spec.cluster.name if study.spec.cluster else 'Real processes'}: {study.verdict.lines[0]}"
            command = shlex.join(study.spec.command(out=f"studies/{study.name}"))
            block = nodes.literal_block(command, command, language="text")
            said += nodes.list_item("", nodes.paragraph(text=text), block)
        up = "../" * environment.docname.count("/")
        link = nodes.raw("", f'<p><a href="{up}{REPORTS}/{file}">The report</a></p>', format="html")
        return [said, link]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("report", Report)
    return {"parallel_read_safe": True}
