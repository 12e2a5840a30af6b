"""What acts in the simulation for a worker that computes in another process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from paceline.comm.base import Collective, ReduceOp, Store, Timing, Work
from paceline.comm.segment import Segment, SegmentAddress
from paceline.engines.scripting import Outcome
from paceline.engines.virtual.process import Process
from paceline.engines.virtual.spread.carrier import Carrier
from paceline.engines.virtual.spread.crew import Crew
from paceline.engines.virtual.spread.messages import Answer, Ask, Begin, Busy, Keep, Over, Print
from paceline.engines.virtual.spread.order import RecordsInOrder
from paceline.records import Reporter, StepRecord


@final
class Deputy:
    """One worker's. `act` is the program of its process.

    Args:
        rank: of the worker.
        crew: where it computes.
        process: the deputy's own, whose clock follows the worker's.
        collective, store: as the worker would have them here.
        reporter: writes files; its records go through `records`.
        say: is given each line that the worker prints.
        is_ending: whether another member has failed.
    """

    def __init__(
        self,
        rank: int,
        crew: Crew,
        process: Process,
        *,
        collective: Collective,
        store: Store | None,
        reporter: Reporter,
        records: RecordsInOrder,
        say: Callable[[str], None],
        is_ending: Callable[[], bool],
    ) -> None:
        self.num_steps = 0
        """That the worker is known to have done."""
        self._rank, self._crew, self._process = rank, crew, process
        self._collective, self._store, self._reporter = collective, store, reporter
        self._records, self._say, self._is_ending = records, say, is_ending
        self._carrier = Carrier()
        self._prepared: dict[int, tuple[Tensor, Callable[[], Work]]] = {}
        self._works: dict[int, tuple[Work, Tensor | None]] = {}
        self._trouble: Exception | None = None  # with what nobody waits for; the next one who asks hears of it

    def act(self) -> Outcome:
        """Have the worker begin, and do what it asks for until it is over.

        Raises:
            EOFError: its process has died.
        """
        self._records.begin(self._process.turn)
        self._answer()
        while True:
            self._process.let_pass()
            for said in self._carrier.unpack(self._crew.receive(self._rank)):
                match said:
                    case Begin():
                        self._begin(said)
                    case Ask():
                        self._do(said)
                    case Busy():
                        self._process.advance_to(said.until_s)
                    case Keep():
                        self._keep(said)
                    case Print():
                        self._say(said.line)
                    case Over():
                        self._records.end(self._process.turn)
                        return said.outcome

    # --- what the worker says -----------------------------------------------------------------------------------

    def _begin(self, said: Begin) -> None:
        self._process.advance_to(said.clock_s)
        try:
            getattr(self, said.method)(*said.arguments)
        except Exception as error:
            self._trouble = self._trouble or error

    def _do(self, said: Ask) -> None:
        turn = self._process.turn
        self._process.advance_to(said.clock_s)
        try:
            if self._trouble is not None:
                raise self._trouble
            value, error = getattr(self, said.method)(*said.arguments), None
        except Exception as trouble:
            value, error = None, trouble
        if self._process.turn != turn:
            self._records.end(turn)
            self._records.begin(self._process.turn)
        self._answer(value, error)

    def _keep(self, said: Keep) -> None:
        if isinstance(said.record, StepRecord):
            self.num_steps = said.record.step
        self._records.add(self._process.turn, said.record)

    def _answer(self, value: Any = None, error: Exception | None = None) -> None:
        timings = self._collective.timing, self._store.timing if self._store is not None else Timing()
        answer = Answer(
            self._process.now_s, timings, self._reporter.stop_requested(), self._is_ending(), value, _alone(error)
        )
        self._crew.send(self._rank, self._carrier.pack(answer))

    # --- what it can ask for ------------------------------------------------------------------------------------

    def call(self, of: str, method: str, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        return getattr(self._store if of == "store" else self._collective, method)(*arguments, **settings)

    def allocate(self, of: str, num_bytes: int) -> SegmentAddress:
        self.call(of, "allocate", (num_bytes,), {})
        segment = Segment.create(num_bytes)
        self._carrier.share(segment)
        return segment.address

    def save(self, name: str, content: bytes) -> None:
        self._reporter.save(name, content)

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        self._collective.broadcast(tensor, root=root)
        return tensor

    def prepare_all_reduce(self, number: int, tensor: Tensor, op: ReduceOp) -> None:
        self._prepared[number] = tensor, self._collective.persistent_all_reduce(tensor, op=op)

    def all_reduce(self, number: int, prepared: int, content: Tensor | None) -> None:
        tensor, start = self._prepared[prepared]
        if content is not None:
            tensor.copy_(content)
        self._works[number] = start(), tensor

    def send(self, number: int, tensor: Tensor, destination: int) -> None:
        self._works[number] = self._collective.send(tensor, destination=destination), None

    def recv(self, number: int, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> None:
        tensor = torch.empty(shape, dtype=dtype)
        self._works[number] = self._collective.recv(tensor, source=source), tensor

    def wait(self, number: int) -> Tensor | None:
        work, tensor = self._works[number]
        work.wait()
        del self._works[number]
        return tensor

    def poll(self, number: int) -> tuple[bool, Tensor | None]:
        work, tensor = self._works[number]
        if not work.poll():
            return False, None
        del self._works[number]
        return True, tensor


def _alone(error: Exception | None) -> Exception | None:
    """Without what only this process can make sense of."""
    return error.with_traceback(None) if error is not None else None
