"""What a client is told whose request is not taken; ``engine.admission`` decides that.

Other reasons are told where they arise: memory and loading in ``library``, a server that stops in ``service``, a
deadline that passed in ``dispatch``. ``metrics`` lists the names of all of them (``DROPS``, ``REFUSALS``).
"""

from __future__ import annotations

from weft.base.errors import Expired, Overloaded, RequestError
from weft.engine.admission import Refusal
from weft.engine.tickets import WaitingLine
from weft.serving.streams import ServedModel

QUEUE_FULL = "exceeds its maximum queue size"


def refused(model: ServedModel, refusal: Refusal, everybody: WaitingLine) -> RequestError:
    """*everybody*: the line of all requests, whoever they are for."""
    match refusal.reason:
        case "all_full":
            return Overloaded(f"{everybody.waiting} requests are waiting, which is the limit; send it again later")
        case "line_full":
            return Overloaded(
                f"{model.name}: {QUEUE_FULL} of {model.line.places}; send it again later",
                retry_after_s=refusal.ahead / 1e9,
            )
        case "unmeetable":
            return Expired(
                f"{model.name}: its deadline cannot be met: {refusal.ahead / 1e6:.1f} ms of work stand before it, "
                f"and it takes {refusal.own / 1e6:.1f} ms",
                reason="unmeetable",
            )
