"""How many bytes of requests and of unread answers the server holds at a time, over all connections and protocols."""

from __future__ import annotations

from weft.base.errors import OverBudget

UNCOUNTED_BYTES = 64 * 1024
"""Bodies up to this are not counted: they are bounded by the connections, and shall find room whatever others send."""


class ByteBudget:
    """Bytes that may be held together.

    Nobody gets more than half of what is left, unless nobody else has any: large requests thus leave room for smaller
    ones, and those for smaller ones still.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.peak_bytes = 0
        """The most that was held since it was last set to 0."""

    def take(self, count: int, own_bytes: int = 0) -> None:
        """Hold so many more bytes for a request that has *own_bytes*; OverBudget if there is no room for them now."""
        wanted, others = own_bytes + count, self.held_bytes - own_bytes
        left = self.limit_bytes - others
        if wanted > left or (others and 2 * wanted > left):
            raise OverBudget(
                f"no room for {wanted} bytes: {others} of {self.limit_bytes} are held for other requests; "
                "send it again later"
            )
        self.add(count)

    def add(self, count: int) -> None:
        """Hold bytes that are there whether there is room or not, such as an answer that nobody reads."""
        self.held_bytes += count
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def give(self, count: int) -> None:
        """Hold so many bytes no longer."""
        self.held_bytes -= count
