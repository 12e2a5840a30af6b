"""A small script that takes as long as a test wants, and the steps that its workers have recorded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

SCRIPT = """
import torch, paceline
from torch.utils.data import DataLoader, TensorDataset
worker = paceline.init()
model = torch.nn.Linear(4, 1)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
loader = DataLoader(data, batch_size={batch_size}, shuffle=True)
model, optimizer, loader = worker.prepare(model, optimizer, loader)
import time
from pathlib import Path
for epoch in range({epochs}):
    while {waits} and epoch == {epochs} - 1 and not Path({go!r}).exists():
        time.sleep(0.05)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        time.sleep({pause_s})
"""


def write_script(
    directory: Path, *, epochs: int, pause_s: float = 0.0, waits: bool = False, batch_size: int = 8
) -> str:
    """`waits`: before its last pass, until there is a file `go` beside it."""
    (directory / "train.py").write_text(
        SCRIPT.format(epochs=epochs, pause_s=pause_s, waits=waits, go=str(directory / "go"), batch_size=batch_size)
    )
    return "train.py"


def lines_by_rank(path: Path) -> Counter[str]:
    return Counter(line.partition(",")[0] for line in path.read_text().splitlines()) if path.exists() else Counter()
