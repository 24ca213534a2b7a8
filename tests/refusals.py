"""What tests say of refusals: their code and the value that was given. Wording is in contracts/messages.txt."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvsift.errors import InputError


@contextmanager
def refused(expected: str) -> Iterator[pytest.ExceptionInfo[InputError]]:
    """Expect an ``InputError`` of the code before the first ": "; what is after it is part of the message."""
    code, _, given = expected.partition(": ")
    with pytest.raises(InputError, match=re.escape(given) or None) as caught:
        yield caught
    assert caught.value.code == code
