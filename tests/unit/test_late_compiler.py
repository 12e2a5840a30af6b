"""torch's compiler is loaded when somebody compiles, and is then what it would have been; and what no process of a run
has to load before its first step, it does not."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest

NOT_NEEDED = ("sympy", "torch._dynamo.", "torch._inductor", "torch.distributed.fsdp", "pandas", "scipy", "plotly")
"""What takes tenths of a second and more to load."""
PUT_OFF = """
    import sys
    import torch
    from paceline.engines import late_compiler
    late_compiler.put_off()
    stand_in = sys.modules["torch._dynamo"]
"""
STEPS = """
    def train(kind):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        optimizer.load_state_dict(optimizer.state_dict())
        return torch.cat([each.detach().flatten() for each in model.parameters()])

    def train_all():
        return [train(kind) for kind in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "RAdam", "Rprop", "Adamax")]
"""
GRAPHS = """
    def num_nodes_of_graphs():
        model, nodes = torch.nn.Linear(8, 1), []
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def backend(graph, _):
            nodes.append(len(graph.graph.nodes))
            return graph.forward

        @torch.compile(backend=backend)
        def step(x):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()

        step(torch.randn(4, 8))
        return nodes
"""


def run(*code: str) -> str:
    """What a program says that has loaded nothing yet."""
    program = "\n".join(map(dedent, code))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_steps_do_without_the_compiler() -> None:
    run(
        PUT_OFF,
        STEPS,
        """
        import inspect
        train_all()
        inspect.getmodule(train)  # looks through all modules
        assert sys.modules["torch._dynamo"] is stand_in
        assert "sympy" not in sys.modules
        """,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "asking",
    [
        "import torch._dynamo.utils",
        "from torch._dynamo import config",
        "torch.compile(lambda x: x, backend='eager')(torch.zeros(1))",
    ],
)
def test_the_compiler_is_there_when_it_is_asked_for(asking: str) -> None:
    run(
        PUT_OFF,
        STEPS,
        f"""
        before = train_all()
        {asking}
        compiler = sys.modules["torch._dynamo"]
        assert compiler is not stand_in
        assert torch._dynamo is compiler
        parts = [name for name in sys.modules if name.startswith("torch._dynamo.") and name.count(".") == 2]
        for name in parts:  # each is loaded once
            part = getattr(compiler, name.rpartition(".")[2])
            assert part is sys.modules[name] or type(part) is not type(sys), name
            assert sys.modules[name].__spec__.origin == sys.modules[name].__file__, name
        assert all(map(torch.equal, before, train_all()))
        """,
    )


@pytest.mark.slow
def test_what_is_compiled_leaves_alone_what_it_would_have_left_alone() -> None:
    late = run(PUT_OFF, STEPS, GRAPHS, "train_all()", "print(num_nodes_of_graphs())")
    at_once = run("import torch", "import torch._dynamo", STEPS, GRAPHS, "train_all()", "print(num_nodes_of_graphs())")
    assert late == at_once


@pytest.mark.slow
def test_what_a_script_keeps_from_being_compiled_is_not() -> None:
    run(
        PUT_OFF,
        """
        seen = []
        @torch.compiler.disable
        def kept(x):
            seen.append(torch.compiler.is_compiling())
            return x + 1
        torch.compile(lambda x: kept(x) * 2, backend="eager")(torch.zeros(1))
        assert seen == [False], seen
        """,
    )


@pytest.mark.parametrize("module", ["paceline.engines.ray.worker_actor", "paceline.engines.ray.server_actor"])
def test_a_member_has_loaded_no_more_than_it_needs_at_its_first_step(module: str) -> None:
    run(
        f"""
        import sys
        import {module}
        from paceline.engines import late_compiler
        late_compiler.put_off()
        import torch
        import paceline
        worker = paceline.init()
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        data = torch.utils.data.TensorDataset(torch.randn(16, 8))
        model, optimizer, loader = worker.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        loaded = [name for name in sys.modules if name.startswith({(*NOT_NEEDED, "rich", "typer")!r})]
        assert not loaded, loaded
        """
    )


def test_a_launcher_loads_no_more_than_it_needs() -> None:
    run(
        f"""
        import sys
        from paceline.cli import commands
        commands.load("run")
        import paceline.running.launch
        from paceline.strategies import build
        build("fed-avg:clients=4"), build("local-sgd"), build("ps-bsp")
        loaded = [name for name in sys.modules if name.startswith({(*NOT_NEEDED, "torch._dynamo")!r})]
        assert not loaded, loaded
        """
    )


def test_the_command_line_tries_an_optimizer_without_the_compiler() -> None:
    run(
        f"""
        import sys
        from paceline.cli import beginning
        with beginning.ray_beside_imports(engine="virtual", address=None, insecure=False, num_workers=2):
            from paceline.strategies import build
            build("diloco")
        loaded = [name for name in sys.modules if name.startswith({NOT_NEEDED!r})]
        assert not loaded, loaded
        """
    )
