"""What a command leaves behind: its exit code, its streams, its files."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """What a command left: its exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """stdout as the one JSON document it should be."""
        assert self.code == 0, self.err
        return json.loads(self.out)


Run = Callable[..., Outcome]
Refused = Callable[..., str]


def files_in(folder: Path) -> dict[str, bytes | None]:
    """Every file with its content, and every folder."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}
