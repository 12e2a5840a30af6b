"""`paceline attack`: what a gradient tells of its sample or its batch, and how easily a trained model is deceived."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.errors import UsageError, unknown

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.data import Dataset, Split

_METHODS = {"leak": "idlg", "evade": "pgd", "property": "ink"}
_OF_SOME = {
    "samples": ("leak", "evade"),
    "batches": ("property",),
    "steps": ("leak",),
    "lr": ("leak",),
    "noise": ("leak",),
    "out": ("leak", "evade"),
}
"""Options that have no effect under other kinds."""
_PLACES = ("kind", "trained")
_SHOWN = 10


def attack(
    context: typer.Context,
    kind: Annotated[
        str,
        typer.Argument(
            help="leak, property: from gradients of samples, or of batches; evade: a trained model.",
            metavar="leak|property|evade",
        ),
    ],
    trained: Annotated[
        Path | None,
        typer.Argument(help="A run's directory, or its model file, for evade.", metavar="MODEL", show_default=False),
    ] = None,
    model: Annotated[str, typer.Option(help="Of paceline.models.")] = "mlp",
    dataset: Annotated[str, typer.Option(help="Of paceline.data.")] = "digits",
    method: Annotated[
        str | None,
        typer.Option(
            help="leak: analytic, dlg, idlg, inverting; property: class, ink; evade: fgsm, pgd; with options as in "
            "pgd:eps=0.1.",
            show_default="idlg; ink; pgd",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="The first so many: of training for leak, of the test for evade.")] = 4,
    batches: Annotated[int, typer.Option(help="property: of each kind, to learn from and to be tried on.")] = 100,
    steps: Annotated[int, typer.Option(help="leak: a client's steps on its sample before it sends its change.")] = 1,
    lr: Annotated[float, typer.Option(help="leak: the client's learning rate.")] = 0.1,
    noise: Annotated[float, typer.Option(help="leak: standard deviation of noise on each element that is sent.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the model, of noise, and of where attacks begin.")] = 0,
    out: Annotated[Path | None, typer.Option(help="A PNG: originals above, below what became of them.")] = None,
) -> None:
    """Recover samples from their gradients (leak), tell from a gradient what its batch holds (property), or deceive a
    trained model by small changes of images (evade).

    Example: paceline attack leak --model lenet --method idlg --out leaked.png
    """
    if kind not in _METHODS:
        raise unknown("attack", kind, _METHODS)
    _require_effect(context, kind, steps=steps)
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"--out {out}: {out.parent} is no folder; make it first")
    if samples < 1 or steps < 1 or lr <= 0 or noise < 0:
        raise UsageError("samples and steps must be at least 1, lr above 0, and noise at least 0")
    if batches < 2:
        raise UsageError("batches must be at least 2")
    from paceline.data import load  # here, because torch takes a while to load

    data, chosen = load(dataset), method or _METHODS[kind]
    if kind == "evade":
        if trained is None:
            raise UsageError("evade needs a trained model: paceline attack evade DIR, or its model.safetensors")
        table, rows = _evade(trained, data, model=model, method=chosen, samples=samples, seed=seed)
    elif trained is not None:
        raise UsageError(f"{kind} is of a fresh model, which --model names; leave the file out")
    elif kind == "property":
        table, rows = _property(data, model=model, method=chosen, batches=batches, seed=seed), []
    else:
        table, rows = _leak(
            data, model=model, method=chosen, samples=samples, steps=steps, lr=lr, noise=noise, seed=seed
        )
    Console().print(table)
    if out is not None:
        from paceline.lab.pictures import gallery

        out.write_bytes(gallery([pictures[:_SHOWN] for pictures in rows]))
        Console(soft_wrap=True).print(f"Picture: {out}", markup=False, highlight=False)


def _require_effect(context: typer.Context, kind: str, *, steps: int) -> None:
    """Raises UsageError for an option that was given and changes nothing, and names those that do."""
    source = context.get_parameter_source
    given = {name for name in context.params if source(name) is source("kind")}
    for name, kinds in _OF_SOME.items():
        if name in given and kind not in kinds:
            others = {each for each, those in _OF_SOME.items() if kind not in those}
            known = [each for each in context.params if each not in (*others, *_PLACES)]
            raise UsageError(f"--{name} has no effect on {kind}, which takes --{', --'.join(known)}; leave it out")
    if "lr" in given and steps == 1:
        raise UsageError("--lr has no effect with one step, whose change over its rate is sent; give --steps as well")


def _leak(
    data: "Dataset", *, model: str, method: str, samples: int, steps: int, lr: float, noise: float, seed: int
) -> "tuple[Table, list[Tensor]]":
    import torch

    from paceline.attacks.leaking import Known, Leak, psnr
    from paceline.models import build
    from paceline.pieces import read

    leak: Leak = read(Leak, method)  # type: ignore[type-abstract]
    torch.set_num_threads(1)  # networks are small, and threads that wait for each other take longer
    table = Table("sample", "label", "told", "PSNR in dB", title=f"{leak} on {model}")
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    network = build(model, num_classes=data.num_classes, shape=data.shape)
    known = Known(network, data.shape, data.num_classes, *_bounds(data.train), steps, lr)
    inputs, labels = data.train[:samples]
    found = []
    for number, (image, label) in enumerate(zip(inputs, labels, strict=True)):
        sent = [each.detach() for each in known.sent_for(image[None], label[None])]
        heard = [each + noise * torch.randn(each.shape, generator=generator) for each in sent]
        recovered = leak.recovered(heard, known, generator=generator)
        found.append(recovered.inputs[0])
        quality = psnr(_pixels(data.train, recovered.inputs[0]), _pixels(data.train, image))
        table.add_row(str(number), str(int(label)), str(recovered.label), f"{quality:.1f}")
    return table, [_pixels(data.train, inputs), _pixels(data.train, torch.stack(found))]


def _property(data: "Dataset", *, model: str, method: str, batches: int, seed: int) -> "Table":
    """The attacker has the data of training, and looks at gradients of the data of the test."""
    import torch

    from paceline.attacks.inferring import Inference, Pools, Property
    from paceline.models import build
    from paceline.pieces import read

    having: Property = read(Property, method)  # type: ignore[type-abstract]
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    network = build(model, num_classes=data.num_classes, shape=data.shape)
    own, others = (Pools.by(having, *split[: len(split)]) for split in (data.train, data.test))
    inference = Inference(batches=batches)
    found = inference.auc(network, own, others, generator=torch.Generator().manual_seed(seed))
    table = Table("batches with it", "without", "AUC", title=f"{having} on {model}")
    table.add_row(str(batches), str(batches), f"{found:.3f}")
    return table


def _evade(
    trained: Path, data: "Dataset", *, model: str, method: str, samples: int, seed: int
) -> "tuple[Table, list[Tensor]]":
    import torch
    from safetensors import SafetensorError

    from paceline.attacks.evading import Box, Evasion, accuracy
    from paceline.models import build
    from paceline.pieces import read
    from paceline.training.pauses import MODEL_FILE
    from paceline.training.snapshot import read_model_file

    evasion: Evasion = read(Evasion, method)  # type: ignore[type-abstract]
    network = build(model, num_classes=data.num_classes, shape=data.shape)
    path = trained / MODEL_FILE if trained.is_dir() else trained
    try:
        network.load_state_dict(read_model_file(path))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"{path} holds no {model} for {data.name}: {error}; name its --model and --dataset") from None
    network.eval()
    inputs, labels = data.test[:samples]
    low, high = _bounds(data.test)
    box = Box(low, high, evasion.eps * (high - low))
    shown = evasion.evading(network, inputs, labels, box, generator=torch.Generator().manual_seed(seed))
    table = Table("images", "accuracy", "under attack", title=f"{evasion} on {model}")
    table.add_row(str(len(labels)), *(f"{accuracy(network, each, labels):.3f}" for each in (inputs, shown)))
    return table, [_pixels(data.test, inputs), _pixels(data.test, shown)]


def _bounds(split: "Split") -> "tuple[Tensor, Tensor]":
    """What black and white are to the model."""
    return (0 - split.mean) / split.std, (_white(split) - split.mean) / split.std


def _pixels(split: "Split", inputs: "Tensor") -> "Tensor":
    """Inputs as pixels between 0 and 1."""
    return ((inputs * split.std + split.mean) / _white(split)).clamp(0, 1)


def _white(split: "Split") -> float:
    """The brightest pixel that there is: 255, but 16 of digits."""
    return float(split.images.max())
