"""Whether a script can go to hosts by itself, without the files beside it."""

import ast
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from paceline.errors import UsageError


def require_alone(script: Path, text: str) -> None:
    """Raises UsageError for a script that imports a module or a package of its own folder. One that Python cannot read
    fails when it is run, as everywhere."""
    imported: list[ast.alias | ast.ImportFrom] = []
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        imported = list(_imported(ast.parse(text)))
    for node in imported:
        name = ((node.module or "") if isinstance(node, ast.ImportFrom) else node.name).partition(".")[0]
        beside = _beside(script, name)
        if beside is not None:
            raise UsageError(
                f"line {node.lineno} of the script {script.name} imports {name}, which is {beside} beside it, and the "
                "job gets the script alone; put both into the image, and say --script-in-image"
            )


def _imported(node: ast.AST) -> Iterator[ast.alias | ast.ImportFrom]:
    """All that it has to import, but what it can do without."""
    if isinstance(node, ast.Import):
        yield from node.names
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield node
    elif not _is_optional(node):
        for child in ast.iter_child_nodes(node):
            yield from _imported(child)


def _is_optional(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test).endswith("TYPE_CHECKING")
    caught = [handler.type for handler in node.handlers if handler.type] if isinstance(node, ast.Try) else []
    return any(error in ast.unparse(kind) for kind in caught for error in ("ImportError", "ModuleNotFoundError"))


def _is_installed(name: str) -> bool:
    found = find_spec(name)
    return found is not None and found.origin is not None  # else it is a folder without __init__.py, such as this one


def _beside(script: Path, name: str) -> str | None:
    """What Python finds under this name in the script's folder, which it looks through first."""
    module, package = script.with_name(f"{name}.py"), script.with_name(name)
    with suppress(OSError, ValueError):  # such as a name that is too long for a file
        if module.is_file() and module.resolve() != script.resolve():
            return f"the module {module.name}"
        # A folder without __init__.py is a package as well, where no other has its name.
        if (package / "__init__.py").is_file() or (any(package.glob("*.py")) and not _is_installed(name)):
            return f"the package {package.name}/"
    return None
