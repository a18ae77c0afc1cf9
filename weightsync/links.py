"""The links of a trainer rank: offered, formed, planned for and ended as it is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from weightsync.agreement import planned
from weightsync.errors import WeightSyncError
from weightsync.link import TrainerLink
from weightsync.messages import Fault, LinkFailed, LinkOffered, LinkReady
from weightsync.quarantine import end_link
from weightsync.runtime import in_thread

if TYPE_CHECKING:
    from weightsync.engines import Engines
    from weightsync.messages import Agree, DropLink, FormLink, Layout, OfferLink
    from weightsync.peer import Peer
    from weightsync.remembered import Remembered
    from weightsync.runtime import Tasks


class Links:
    """One link for each replica that joins, and the layouts that all of them know."""

    def __init__(
        self,
        rank: int,
        peer: Peer,
        engines: Engines,
        layouts: Remembered[bytes, Layout],
    ) -> None:
        self._rank: Final = rank
        self._peer: Final = peer
        self._engines: Final = engines
        self._layouts: Final = layouts
        self._links: dict[int, TrainerLink | None] = {}  # None while it is made

    def get(self, link: int) -> TrainerLink | None:
        """Return a link; None where it was dropped, or is not offered yet."""
        return self._links.get(link)

    def offer(self, tasks: Tasks, message: OfferLink) -> None:
        """Make a link, and say how it is reached."""
        self._links[message.link] = None
        tasks.start_soon(self._offer, message)

    async def _offer(self, message: OfferLink) -> None:
        """In a thread: torch asks a name server, which may not answer for long."""
        try:
            engine = self._engines.get(message.engine)
            args = self._rank, self._layouts, engine, message.replica
            link = await in_thread(TrainerLink, *args)
        except WeightSyncError as error:
            self._links.pop(message.link, None)
            self._peer.post(LinkFailed(message.link, Fault.of(error)))
            return
        if message.link not in self._links:
            await end_link(link, self._peer)  # it was dropped meanwhile
            return
        self._links[message.link] = link
        sources = len(engine.sources)
        self._peer.post(LinkOffered(message.link, link.handle, sources))

    async def form(self, link: TrainerLink, message: FormLink) -> None:
        """Form a link that was offered, and say how that went.

        Also one that is dropped meanwhile, because another rank could not form it: each
        rank says itself whether its memory is enough.
        """
        try:
            await in_thread(link.join, message)
        except (WeightSyncError, RuntimeError) as error:
            self._peer.post(LinkFailed(message.link, Fault.of(error)))
        else:
            self._peer.post(LinkReady(message.link))

    async def plan(self, message: Agree) -> None:
        """Plan a layout, and say what came of it."""
        link = self.get(message.link)
        if link is not None:
            self._peer.post(await planned(link, message))

    def drop(self, tasks: Tasks, message: DropLink) -> None:
        """Forget a link, and end it."""
        link = self._links.pop(message.link, None)
        if link is not None:
            tasks.start_soon(end_link, link, self._peer)

    def take_all(self) -> list[TrainerLink]:
        """Return all links, which are not known here any more, to be aborted."""
        links, self._links = self._links.values(), {}
        return [link for link in links if link is not None]
