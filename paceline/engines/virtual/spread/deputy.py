"""What acts in the simulation for a worker that computes in another process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from paceline.comm.base import Collective, Push, ReduceOp, Reply, Store, Timing, Work
from paceline.comm.shared_memory.block import BlockAddress, SharedBlock
from paceline.engines.scripting import Outcome
from paceline.engines.virtual.process import Process
from paceline.engines.virtual.promise import kept_until
from paceline.engines.virtual.spread.carrier import Carrier
from paceline.engines.virtual.spread.crew import Crew
from paceline.engines.virtual.spread.messages import Answer, Ask, Begin, Busy, Keep, Over, Print
from paceline.engines.virtual.spread.order import RecordsInOrder
from paceline.errors import RunFailed
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
        self._opening: list[SharedBlock] = []  # of which the worker has been told, and may not have opened yet
        self._prepared: dict[int, tuple[Tensor, Callable[[], Work]]] = {}
        self._works: dict[int, tuple[Work, Tensor | None]] = {}
        self._trouble: Exception | None = None  # with what nobody waits for; the next one who asks hears of it
        self._turn: int | None = None
        self._goes_on = False  # whether the worker may, when it has been answered

    def act(self) -> Outcome:
        """Have the worker begin, and do what it asks for until it is over.

        Raises:
            EOFError: its process has died.
        """
        self._answer()
        self._process.let_pass()
        try:
            while True:
                content = self._crew.receive(self._rank)
                self._note_turn()
                for segment in self._opening:
                    segment.close_descriptor()
                self._opening.clear()
                outcome = self._follow(self._carrier.unpack(content))
                if outcome is not None:
                    return outcome
        finally:
            self._note_turn(is_over=True)

    def close(self) -> None:
        """Let go of what is shared with the worker, which is over."""
        self._prepared.clear()
        self._works.clear()
        self._carrier.close()

    def _follow(self, frame: list[object]) -> Outcome | None:
        """Do what the worker says; returns how it has ended if it has."""
        for said in frame:
            match said:
                case Begin():
                    self._begin(said)
                case Ask():
                    self._do(said)
                case Busy():
                    self._process.let_pass(until_s=said.until_s)
                case Keep():
                    self._keep(said)
                case Print():
                    self._say(said.line)
                case Over():
                    return said.outcome
        return None

    def _note_turn(self, *, is_over: bool = False) -> None:
        """Records that come from here on are of the process's present turn."""
        turn = None if is_over else self._process.turn
        if turn == self._turn:
            return
        if self._turn is not None:
            self._records.end(self._turn)
        self._turn = turn
        if turn is not None:
            self._records.begin(turn)

    # --- what the worker says -----------------------------------------------------------------------------------

    def _begin(self, said: Begin) -> None:
        self._process.advance_to(said.clock_s)
        try:
            getattr(self, said.method)(*said.arguments)
        except Exception as error:
            self._trouble = self._trouble or error

    def _do(self, said: Ask) -> None:
        self._process.advance_to(said.clock_s)
        trouble, self._trouble = self._trouble, None
        self._goes_on = False
        try:
            if trouble is not None:
                raise trouble
            value, error = getattr(self, said.method)(*said.arguments), None
        except Exception as met:
            value, error = None, met
        self._note_turn()
        until_s = None
        if said.ahead_s is not None and self._goes_on:
            until_s = kept_until(self._process.now_s, said.ahead_s)
        self._answer(value, error, is_busy=until_s is not None)
        self._process.let_pass(until_s=until_s)

    def _keep(self, said: Keep) -> None:
        if isinstance(said.record, StepRecord):
            self.num_steps = said.record.step
        assert self._turn is not None
        self._records.add(self._turn, said.record)

    def _answer(self, value: Any = None, error: Exception | None = None, *, is_busy: bool = False) -> None:
        """
        Args:
            is_busy: it is known until when the worker computes after it.
        """
        store_timing = self._store.timing if self._store is not None else Timing()
        answer = Answer(
            self._process.now_s,
            (vars(self._collective.timing), vars(store_timing)),
            self._reporter.stop_requested(),
            self._is_ending(),
            self._goes_on,
            value,
            _portable(error),
        )
        self._crew.send(self._rank, self._carrier.pack(answer), is_busy=is_busy)

    # --- what it can ask for ------------------------------------------------------------------------------------

    def call(self, of: str, method: str, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        value = getattr(self._store if of == "store" else self._collective, method)(*arguments, **settings)
        self._goes_on = of == "collective"
        return value

    def exchange(self, push: Push) -> Reply:
        assert self._store is not None
        reply = self._store.exchange(push)
        self._goes_on = reply.goes_on(pause_at=push.pause_at)
        return reply

    def allocate(self, of: str, num_bytes: int) -> BlockAddress:
        self.call(of, "allocate", (num_bytes,), {})
        segment = SharedBlock.create(num_bytes)
        self._carrier.share(segment)
        self._opening.append(segment)
        return segment.address

    def save(self, name: str, content: bytes) -> None:
        self._reporter.save(name, content)

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        self._collective.broadcast(tensor, root=root)
        self._goes_on = True
        return tensor

    def all_reduce(self, number: int, tensor: Tensor, op: ReduceOp) -> None:
        self._works[number] = self._collective.all_reduce(tensor, op=op), tensor

    def prepare_all_reduce(self, number: int, tensor: Tensor, op: ReduceOp) -> None:
        self._prepared[number] = tensor, self._collective.persistent_all_reduce(tensor, op=op)

    def start_all_reduce(self, number: int, prepared: int) -> None:
        tensor, start = self._prepared[prepared]
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
        self._goes_on = True
        return tensor

    def poll(self, number: int) -> tuple[bool, Tensor | None]:
        work, tensor = self._works[number]
        if not work.poll():
            return False, None
        del self._works[number]
        return True, tensor


def _portable(error: Exception | None) -> Exception | None:
    """The error, or one that says the same where it cannot go to another process."""
    if error is None:
        return None
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        return RunFailed(f"{type(error).__name__}: {error}")
