"""Whether a script can go to hosts by itself, without the files beside it."""

import ast
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import UsageError


def require_alone(script: Path, text: str) -> None:
    """Raises UsageError for a script that imports a module or a package of its own folder. One that Python cannot read
    fails when it is run, as everywhere."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for name in _imported(tree):
        beside = next(filter(Path.exists, (script.parent / f"{name}.py", script.parent / name / "__init__.py")), None)
        if beside is not None and beside.resolve() != script.resolve():
            raise UsageError(
                f"the script {script.name} imports {name}, which is in {beside.relative_to(script.parent)}, and the "
                "job gets the script alone; put both into the image, and say --script-in-image"
            )


def _imported(tree: ast.Module) -> Iterator[str]:
    """The first part of each name, wherever in the script it is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
