"""Turns a script of Horovod's into one of Paceline's three lines, as far as its text tells; says what is left.

Only the statements that name Horovod are changed. The script is read, never run.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.errors import UsageError

_PLACES = {"rank": "rank", "size": "size", "local_rank": "local_rank"}
"""Horovod's functions without arguments, and the attributes of a worker that say the same."""
_REDUCTIONS = {"Average": "mean", "Sum": "sum", "Min": "min", "Max": "max", "Product": "product"}
_GONE = {"broadcast_parameters": "prepare", "broadcast_optimizer_state": "prepare", "shutdown": "the run's end"}
"""Calls whose work is done elsewhere."""
_REMEDIES = {
    "compression": "give the run --option codec=fp16, or another codec (docs/codecs.md)",
    "backward_passes_per_step": "put all passes but the last in `with worker.no_sync():`",
    "op": "the run's strategy says how gradients are joined",
    "gradient_predivide_factor": "the mean needs no factor; leave it out",
    "num_groups": "buckets need no groups; leave it out",
    "groups": "buckets need no groups; leave it out",
    "sparse_as_dense": "gradients are dense; give Embedding sparse=False",
    "process_set": "all workers train; see --strategy for others",
}


class Note(NamedTuple):
    line: int
    text: str


class Migrated(NamedTuple):
    source: str
    notes: tuple[Note, ...]
    """What the script's owner has to look at, by line of the old source."""


@dataclass
class _Facts:
    """What the script calls what."""

    horovod: str
    model: str = ""
    optimizer: ast.Assign | None = None
    sampler: ast.Assign | None = None
    loader: ast.Assign | None = None


@dataclass
class _Edits:
    """Changes of a text, by places of its syntax tree."""

    source: str
    changes: list[tuple[int, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lines = self.source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._num_removed: Counter[int] = Counter()

    def at(self, line: int, column: int) -> int:
        """Where it is in the text; columns of a syntax tree count bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def text(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.source, node) or ""

    def replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        span = self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)
        self.changes.append((*span, text))

    def remove(self, statement: ast.stmt, siblings: Sequence[ast.stmt], *, is_of_horovod: bool = True) -> None:
        """Its lines, with a comment about Horovod right above if it is Horovod's. Where a block is removed whole, or
        something else stands on these lines, `pass` is left."""
        self._num_removed[id(siblings)] += 1
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        others = [each for each in siblings if each is not statement]
        shares = any(each.lineno <= last and (each.end_lineno or each.lineno) >= first for each in others)
        if shares or self._num_removed[id(siblings)] == len(siblings):
            self.replace(statement, "pass")
            return
        while is_of_horovod and first > 1 and re.match(r"\s*#.*horovod", self._lines[first - 2], re.IGNORECASE):
            first -= 1
        self.changes.append((self._starts[first - 1], self._starts[last], ""))

    def insert_after(self, statement: ast.stmt, text: str) -> None:
        place = self._starts[statement.end_lineno or statement.lineno]
        self.changes.append((place, place, f"{' ' * statement.col_offset}{text}\n"))

    def unwrap(self, block: ast.With) -> None:
        """The body in the place of the whole."""
        body = block.body
        start, end = self._starts[block.lineno - 1], self._starts[body[0].lineno - 1]
        self.changes.append((start, end, ""))
        shift = body[0].col_offset - block.col_offset
        for line in range(body[0].lineno, (body[-1].end_lineno or body[-1].lineno) + 1):
            if self._lines[line - 1].startswith(" " * shift):
                self.changes.append((self._starts[line - 1], self._starts[line - 1] + shift, ""))

    def applied(self) -> str:
        """Changes inside of a removed statement are gone with it; what is inserted right before it is not."""
        found, at = [], 0
        for start, end, text in sorted(self.changes, key=lambda change: (change[0], change[1] > change[0], -change[1])):
            if start >= at:
                found += [self.source[at:start], text]
                at = end
        return "".join([*found, self.source[at:]])


def migrate(source: str) -> Migrated:
    """The script with Paceline's three lines, and notes on what they leave to be done.

    Raises:
        UsageError: it is no script of Horovod's for PyTorch, or model, optimizer and loader cannot be told.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise UsageError(f"the script is not valid Python: {error}") from None
    facts = _facts_of(tree)
    migrated, notes = _changed(source, tree, facts, is_kept=False)
    left = _left_of(migrated, facts.horovod)
    if left:  # which needs the import
        migrated, notes = _changed(source, tree, facts, is_kept=True)
        notes += [
            Note(0, f"line {line} of the new script: {name} is left; see worker's operations in docs/script.md")
            for line, name in _left_of(migrated, facts.horovod)
        ]
    if "worker.all_reduce(" in migrated:
        text = "worker.all_reduce in the training loop takes lock step; average metrics in @worker.evaluation"
        notes.append(Note(0, text))
    notes.append(Note(0, "add @worker.evaluation above a function of the model that returns metrics (docs/script.md)"))
    return Migrated(migrated, tuple(sorted(set(notes))))


def _changed(source: str, tree: ast.Module, facts: _Facts, *, is_kept: bool) -> tuple[str, list[Note]]:
    edits, notes = _Edits(source), list[Note]()
    _change_statements(tree, facts, edits, notes, is_kept=is_kept)
    _change_expressions(tree, facts, edits)
    return _without_idle_imports(edits.applied(), source), notes


def _without_idle_imports(migrated: str, before: str) -> str:
    """The new script without imports that only what is gone has used. Those that nothing used before may be there for
    what they do, and stay, as do those with comments inside."""
    tree = ast.parse(migrated)
    edits, used = _Edits(migrated), _used(migrated)
    idle = _used(before) - used
    for siblings in _bodies(tree):
        for statement in siblings:
            if not isinstance(statement, ast.Import | ast.ImportFrom) or "#" in edits.text(statement):
                continue
            left = [ast.unparse(each) for each in statement.names if not _is_idle(each, idle, used)]
            if not left:
                edits.remove(statement, siblings, is_of_horovod=False)
            elif len(left) < len(statement.names):
                start = "import" if isinstance(statement, ast.Import) else f"from {_module(statement)} import"
                edits.replace(statement, f"{start} {', '.join(left)}")
    return edits.applied()


def _is_idle(alias: ast.alias, idle: set[str], used: set[str]) -> bool:
    """An import of `a.b` also gives `a`, and may load what is used as `a.c`."""
    name = alias.asname or alias.name
    return name in idle and name.partition(".")[0] not in used


def _module(statement: ast.ImportFrom) -> str:
    return "." * statement.level + (statement.module or "")


def _used(source: str) -> set[str]:
    """Names, with and without attributes, and words in strings and comments that may be annotations."""
    found = {word for comment in re.findall(r"#\s*type:(.*)", source) for word in re.findall(r"\w+", comment)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name | ast.Attribute):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(re.findall(r"\w+", node.value))
    return found


def _left_of(migrated: str, horovod: str) -> list[tuple[int, str]]:
    """Where the new script still names Horovod."""
    nodes = [node for node in ast.walk(ast.parse(migrated)) if isinstance(node, ast.Attribute)]
    names = [(node.lineno, ast.unparse(node)) for node in nodes if ast.unparse(node.value) == horovod]
    return sorted(names)


def _facts_of(tree: ast.Module) -> _Facts:
    facts = _Facts(_name_of_horovod(tree))
    loaders = []
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    samplers = {
        _target(each): each for each in assigned if _called(each.value).endswith("DistributedSampler") and _target(each)
    }
    set_epochs = {_called(node).removesuffix(".set_epoch") for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for each in assigned:
        called = _called(each.value)
        if called == f"{facts.horovod}.DistributedOptimizer":
            facts.optimizer = each
        elif called.split(".")[-1] == "DataLoader" and _target(each):
            loaders.append(each)
    if facts.optimizer is None or not _target(facts.optimizer):
        raise UsageError("no optimizer = hvd.DistributedOptimizer(...) is in the script")
    facts.model = _model_of(tree, facts)
    facts.loader = _training_loader(loaders, set_epochs)
    facts.sampler = samplers.get(_keyword_name(facts.loader.value, "sampler"))
    return facts


def _name_of_horovod(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "horovod.torch":
                    return alias.asname or "horovod.torch"
        if isinstance(node, ast.ImportFrom) and node.module == "horovod":
            for alias in node.names:
                if alias.name == "torch":
                    return alias.asname or "torch"
    raise UsageError("the script does not import horovod.torch by a name, as in `import horovod.torch as hvd`")


def _model_of(tree: ast.Module, facts: _Facts) -> str:
    """The model's name, from `hvd.broadcast_parameters(model.state_dict(), ...)` or
    `named_parameters=model.named_parameters()`."""
    assert facts.optimizer is not None
    for node in [*ast.walk(facts.optimizer.value), *ast.walk(tree)]:
        owner, _, method = _called(node).rpartition(".")
        if method in ("named_parameters", "state_dict") and owner.isidentifier() and owner != _target(facts.optimizer):
            return owner
    raise UsageError("the model cannot be told: give DistributedOptimizer named_parameters=model.named_parameters()")


def _training_loader(loaders: Sequence[ast.Assign], set_epochs: set[str]) -> ast.Assign:
    """The loader whose sampler is told epochs; else the only one, or the only one that is called after training."""
    told = [each for each in loaders if _keyword_name(each.value, "sampler") in set_epochs]
    named = [each for each in loaders if "train" in _target(each)]
    for found in (told, loaders, named):
        if len(found) == 1:
            return found[0]
    raise UsageError(f"which DataLoader trains cannot be told: there are {len(loaders)}; name one of them train_loader")


def _change_statements(tree: ast.Module, facts: _Facts, edits: _Edits, notes: list[Note], *, is_kept: bool) -> None:
    assert facts.optimizer is not None
    assert facts.loader is not None
    optimizer, loader, model = _target(facts.optimizer), _target(facts.loader), facts.model
    names = f"{model}, {optimizer}, {loader}"
    prepare = f"{names} = worker.prepare({names})"
    replaced = {f"{facts.horovod}.init": "worker = paceline.init()"}
    gone = {*(f"{facts.horovod}.{name}" for name in _GONE), f"{optimizer}.synchronize"}
    if facts.sampler is not None:
        gone.add(f"{_target(facts.sampler)}.set_epoch")
    for siblings in _bodies(tree):
        for statement in siblings:
            called = _called(statement.value) if isinstance(statement, ast.Expr) else ""
            if called in replaced:
                edits.replace(statement, replaced[called])
            elif called in gone or statement is facts.sampler:
                edits.remove(statement, siblings)
            elif called == "torch.cuda.set_device" and facts.horovod in edits.text(statement):
                edits.remove(statement, siblings)
                notes.append(Note(statement.lineno, "prepare moves the model to worker.device; move batches there too"))
            elif statement is facts.optimizer:
                _replace_optimizer(facts, edits, notes, prepare, siblings)
            elif isinstance(statement, ast.With):
                if _called(statement.items[0].context_expr) == f"{optimizer}.skip_synchronize":
                    edits.unwrap(statement)
            elif isinstance(statement, ast.Import | ast.ImportFrom) and _imports_horovod(statement):
                edits.replace(statement, _other_imports(statement, kept=edits.text(statement) if is_kept else ""))
    if facts.loader.lineno > facts.optimizer.lineno:
        edits.insert_after(facts.loader, prepare)
    if facts.sampler is not None:
        (keyword,) = (each for each in _call(facts.loader).keywords if each.arg == "sampler")
        start = edits.at(keyword.lineno, keyword.col_offset)
        end = edits.at(keyword.value.end_lineno or 0, keyword.value.end_col_offset or 0)
        edits.changes.append((start, end, f"shuffle={_shuffles(facts.sampler)}"))


def _replace_optimizer(
    facts: _Facts, edits: _Edits, notes: list[Note], prepare: str, siblings: Sequence[ast.stmt]
) -> None:
    assert facts.optimizer is not None
    assert facts.loader is not None
    call, lines = _call(facts.optimizer), []
    own = _argument(call, "optimizer")
    if edits.text(own) != _target(facts.optimizer):
        lines.append(f"{_target(facts.optimizer)} = {edits.text(own)}")
    if facts.loader.lineno < facts.optimizer.lineno:
        lines.append(prepare)
    for keyword in call.keywords:
        if keyword.arg in _REMEDIES and edits.text(keyword.value) != f"{facts.horovod}.Average":
            notes.append(Note(facts.optimizer.lineno, f"{keyword.arg} is gone: {_REMEDIES[keyword.arg]}"))
    if lines:
        edits.replace(facts.optimizer, f"\n{' ' * facts.optimizer.col_offset}".join(lines))
    else:
        edits.remove(facts.optimizer, siblings)


def _change_expressions(tree: ast.Module, facts: _Facts, edits: _Edits) -> None:
    sampler = _target(facts.sampler) if facts.sampler is not None else None
    for node in ast.walk(tree):
        called = _called(node) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and called.startswith(f"{facts.horovod}."):
            _change_call(node, called.removeprefix(f"{facts.horovod}."), edits)
        elif isinstance(node, ast.Call) and called == "len" and sampler and edits.text(node.args[0]) == sampler:
            assert facts.sampler is not None
            dataset = edits.text(_argument(_call(facts.sampler), "dataset"))
            edits.replace(node, f"(len({dataset}) // worker.size)")


def _change_call(node: ast.Call, name: str, edits: _Edits) -> None:
    if name in _PLACES:
        edits.replace(node, f"worker.{_PLACES[name]}")
    elif name == "allreduce" and node.args:
        ops = [edits.text(each.value).split(".")[-1] for each in node.keywords if each.arg == "op"]
        if len(node.args) == 1 and {each.arg for each in node.keywords} <= {"name", "op"} and {*ops} <= {*_REDUCTIONS}:
            op = _REDUCTIONS[ops[0]] if ops else "mean"
            edits.replace(node, f'worker.all_reduce({edits.text(node.args[0])}, op="{op}")')
    elif name == "broadcast_object" and len(node.args) == 1 and {each.arg for each in node.keywords} <= {"name"}:
        edits.replace(node, f"worker.broadcast_object({edits.text(node.args[0])})")
    elif name == "allgather_object" and len(node.args) == 1:
        edits.replace(node, f"worker.all_gather_object({edits.text(node.args[0])})")


def _bodies(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                yield body


def _imports_horovod(statement: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "horovod"
    return any(alias.name == "horovod.torch" for alias in statement.names)


def _other_imports(statement: ast.Import | ast.ImportFrom, *, kept: str) -> str:
    """What else the statement imports, or all of it, and Paceline."""
    others = [each for each in statement.names if each.name not in ("horovod.torch", "torch")]
    if isinstance(statement, ast.Import):
        others = [each for each in statement.names if each.name != "horovod.torch"]
    rest = kept
    if others and not kept:
        names = ", ".join(ast.unparse(each) for each in others)
        rest = f"import {names}" if isinstance(statement, ast.Import) else f"from horovod import {names}"
    return "\n".join(filter(None, [rest, "import paceline"]))


def _called(node: ast.AST | None) -> str:
    """What a call calls, as it is written: `hvd.init`; empty for anything else."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def _call(statement: ast.Assign) -> ast.Call:
    assert isinstance(statement.value, ast.Call)
    return statement.value


def _argument(call: ast.Call, name: str) -> ast.expr:
    """The first argument, which may be given by this name. Raises UsageError if it cannot be told."""
    for given in [*call.args[:1], *(each.value for each in call.keywords if each.arg == name)]:
        if not isinstance(given, ast.Starred):
            return given
    raise UsageError(f"line {call.lineno}: which {name} {_called(call)} gets cannot be told; write it as {name}=...")


def _target(statement: ast.Assign) -> str:
    """The one name that is assigned to; empty if it is not one."""
    target = statement.targets[0]
    return target.id if len(statement.targets) == 1 and isinstance(target, ast.Name) else ""


def _keyword_name(call: ast.expr, keyword: str) -> str:
    assert isinstance(call, ast.Call)
    return next((ast.unparse(each.value) for each in call.keywords if each.arg == keyword), "")


def _shuffles(sampler: ast.Assign) -> bool:
    """A DistributedSampler does unless it is told otherwise."""
    return _keyword_name(sampler.value, "shuffle") != "False"
