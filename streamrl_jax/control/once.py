"""What several trainer processes ask for together is done once. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamrl_jax.control.faults import ControlError


@dataclass(eq=False)
class _Asked:
    reader: int  # who was the first
    digest: bytes
    readers: set[int] = field(default_factory=set)


class Once:
    """Tells the first of several equal requests from the others.

    Invariant: every reader asks for the same things; what two of them ask for under one name is equal, or the second
    one is told of the difference. A request is forgotten when all have made it.

    Args:
        readers: trainer processes.
    """

    def __init__(self, readers: int) -> None:
        self._readers = readers
        self._asked: dict[str, _Asked] = {}

    def first(self, name: str, reader: int, digest: bytes) -> bool:
        """Notes a request.

        Args:
            name: of what is asked for.
            reader: who asks.
            digest: of the request's contents.

        Returns:
            Whether nobody has asked for it before.

        Raises:
            ControlError: another reader asked for something else under this name, or this one did already.
        """
        if self._readers == 1:
            return True
        asked = self._asked.setdefault(name, _Asked(reader, digest))
        if asked.digest != digest:
            raise ControlError(
                f"trainer processes {asked.reader} and {reader} ask for different things as {name} (digests "
                f"{asked.digest.hex()[:12]} and {digest.hex()[:12]}): their configurations, prompts or models differ"
            )
        if reader in asked.readers:
            raise ControlError(f"trainer process {reader} asks for {name} a second time")
        asked.readers.add(reader)
        if len(asked.readers) == self._readers:
            del self._asked[name]
        return len(asked.readers) == 1

    def asked(self, name: str, reader: int) -> bool:
        """Whether a reader has asked, as long as not all have."""
        found = self._asked.get(name)
        return found is not None and reader in found.readers

    def __len__(self) -> int:
        """Requests that some readers have still to make."""
        return len(self._asked)
