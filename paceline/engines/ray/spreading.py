"""Where servers have died or joined, key ranges and copies move between living servers until the load is even again."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, final

from paceline.engines.ray.controller import Controller
from paceline.server.chains import Chain, Chains, Handover, from_body
from paceline.server.spreading import departure, succession


@final
class Spreading:
    """Has one server after another let go of a copy, or hand a key range over to another one that has a copy.

    Args:
        chains: as they are.
        change: has one of them be so from here on.
        serve: has one of them be so, whose first server is another one.
        set_aside: has a server stay what it is to a key range.
        say: shows a line where the run was started.
    """

    def __init__(
        self,
        controller: Controller,
        *,
        chains: Callable[[], Chains],
        change: Callable[[Chain], None],
        serve: Callable[[Chain], None],
        set_aside: Callable[[int, int], None],
        say: Callable[[str], None],
    ) -> None:
        self._controller, self._chains, self._change, self._serve, self._say = controller, chains, change, serve, say
        self._set_aside = set_aside
        self._num_begun = 0

    def turn(self) -> None:
        """Begin with the next move, if there is any. To be called while all key ranges are served, nobody is given a
        copy, and nobody is asked about a key range."""
        chains = self._chains()
        if chains.is_of_the_start or not all(chain.is_at_rest for chain in chains.chains):
            return
        leaving, served = departure(chains), chains.num_served
        if leaving is None:
            following = succession(chains)
            if following is not None:
                self._hand_over(*following)
        elif leaving.server == leaving.chain.head:
            self._hand_over(leaving.chain, min(leaving.chain.servers[1:], key=lambda server: served[server]))
        else:
            self._change(leaving.chain.without(leaving.server))
            copies = len(leaving.chain.servers) - 1
            who, key_range = f"server-{leaving.server}", leaving.chain.key_range
            self._controller.event("released", who, key_range=key_range, copies=copies)

    def hear(self, body: Mapping[str, Any]) -> None:
        """Take in what has become of a handover."""
        told, why_not = from_body(body), str(body.get("why_not"))
        chain = self._chains().chains[told.key_range]
        if chain != told or chain.handover is None:
            return  # it was called off
        if not why_not:
            self._serve(chain.handed_over())
            return
        self._change(replace(chain, handover=None))
        self._controller.event("not_handed_over", f"server-{chain.head}", key_range=chain.key_range, why=why_not)
        self._set_aside(chain.key_range, chain.head)
        self._say(f"server {chain.head} keeps key range {chain.key_range} until servers die or join: {why_not}")

    def call_off(self) -> None:
        """Have whoever serves a key range go on with it."""
        for chain in self._chains().chains:
            if chain.handover is not None:
                self._change(replace(chain, handover=None))

    def _hand_over(self, chain: Chain, to: int) -> None:
        self._num_begun += 1
        self._change(replace(chain, handover=Handover(to, self._num_begun)))
