"""What kvsift says that a plan can do, in every place: the stored verdicts hold.

Where a verdict or a sentence is meant to change: ``python tests/contracts/verdicts.py``, and read the difference.
"""

from difflib import unified_diff

from contracts.verdicts import FILE, rendered, verdicts


def test_verdicts_and_their_sentences_are_as_stored() -> None:
    stored, found = FILE.read_text().splitlines(), rendered(verdicts()).splitlines()
    difference = list(unified_diff(stored, found, "stored", "now", n=0, lineterm=""))
    assert not difference, "\n".join(difference[:60])
