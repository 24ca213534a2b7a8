"""API keys of a file, and addresses that need one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsift.errors import InputError
from kvsift.server.settings import check_exposure, read_keys


@pytest.mark.parametrize(("host", "keys", "is_open", "is_refused"), [
    ("127.0.0.1", [], False, False), ("::1", [], False, False), ("localhost", [], False, False),
    ("0.0.0.0", [], False, True), ("", [], False, True), ("example.org", [], False, True),
    ("0.0.0.0", ["k"], False, False), ("0.0.0.0", [], True, False),
])  # fmt: skip
def test_other_machines_need_a_key(host: str, keys: list, is_open: bool, is_refused: bool) -> None:
    if is_refused:
        with pytest.raises(InputError, match="there is no API key"):
            check_exposure(host, keys, is_open)
    else:
        check_exposure(host, keys, is_open)


def test_a_key_file_of_comments_alone_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# none yet\n\n")
    with pytest.raises(InputError, match="has no key"):
        read_keys(file, {})
