"""Objects that belong to one process and have one owner."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from kvsift.errors import UnsupportedCall


class Uncopied:
    """Refuses ``copy``, ``pickle`` and whatever uses them, such as multiprocessing, and says what to do instead."""

    INSTEAD: ClassVar[str]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        name = type(self).__name__
        raise UnsupportedCall(f"{name} can neither be copied nor be sent to another process. {self.INSTEAD}")
