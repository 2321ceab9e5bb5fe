"""What a worker of several does with its orders, wherever it runs: one after another, until told to end or a fault.

Its own process (`quire.entrypoints.worker`) has one, or a Ray actor. Must not know how messages come and go.
"""

import dataclasses
import gc
from typing import Any

from quire.errors import QuireError
from quire.executor.orders import FAULT, ORDERS, decoded, encoded
from quire.utils.logs import logger


class Rank:
    """One worker, made when it is told to load.

    Attributes:
        fault: the answer after which it carries out nothing; b"" before.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.fault = rank, b""
        self._keeper: Any = None
        self._answers = {"all"}  # the orders that it answers, by whom they ask

    def carry_out(self, number: int, body: bytes | bytearray) -> tuple[int, bytes] | None:
        """The answer to an order, with its number; None where this rank gives none."""
        name, order = list(ORDERS.items())[number]
        try:
            given = [] if order.argument is None else [decoded(body, order.argument)]
            if name == "load":
                gc.disable()  # of what is made from here on nothing is garbage
                from quire.worker.keeper import Keeper  # torch comes in here: the watch must not wait for it

                config = dataclasses.replace(given[0][0], rank=self.rank)
                self._keeper, self._answers = Keeper(config), {"all", "one" if self.rank == config.reporter else "all"}
                value = self._keeper.worker.load(given[0][1] and self.rank == 0)
                gc.freeze()  # the model's objects are here to stay: collections need not look at them again
                gc.enable()
            else:
                value = getattr(self._keeper if name in ("call", "close") else self._keeper.worker, name)(*given)
        except Exception as error:
            if name != "load" or not isinstance(error, QuireError):
                logger.critical("the worker failed in %s", order.doing, exc_info=True)
            kind, text = type(error).__name__, str(error)
            if isinstance(error, MemoryError | OSError) or "allocate memory" in text:  # as torch says it
                kind, text = "MemoryError", f"{text or 'there is no more'}; `quire plan` says what each rank needs"
            self.fault = encoded((kind, text))
            return FAULT, self.fault
        return (number, encoded(value)) if order.answers in self._answers else None
