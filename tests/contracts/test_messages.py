"""The wording of all refusals, in ``messages.txt``: a line has a code and a message, with expressions in braces.

Other tests assert the code and what was given. ``python tests/contracts/test_messages.py`` writes the file anew.
"""

import ast
from pathlib import Path

from kvsift import errors

ROOT = Path(__file__).parents[2]
SNAPSHOT = Path(__file__).with_name("messages.txt")
CODES = {name: found.code for name, found in vars(errors).items() if hasattr(found, "code")}


def messages() -> str:
    """Return the snapshot of the source as it is."""
    trees = [ast.parse(path.read_text("utf-8")) for folder in ("src", "lab") for path in (ROOT / folder).rglob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    raised = {(CODES[_name(call)], _template(call.args[0])) for call in calls if _name(call) in CODES}
    return "".join(f"{code}  {text}\n" for code, text in sorted(raised))


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_template, node.values))
    return f"{{{ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node)}}}"


def test_messages_are_those_of_the_snapshot() -> None:
    assert messages() == SNAPSHOT.read_text("utf-8")


def test_the_code_of_an_error_is_the_name_of_its_class() -> None:
    assert (errors.InputError.code, errors.ContextLengthExceeded.code) == ("input_error", "context_length_exceeded")


if __name__ == "__main__":
    SNAPSHOT.write_text(messages(), "utf-8")
