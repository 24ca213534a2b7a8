"""No class name twice in kvsift and its laboratory: a name means one thing in the whole tree."""

import ast
import collections.abc
from collections import defaultdict

from test_import_law import LABORATORY, SOURCE


def test_no_class_name_is_defined_twice_or_one_of_collections_abc() -> None:
    modules: dict[str, list[str]] = defaultdict(list, {name: ["collections.abc"] for name in collections.abc.__all__})
    for path in sorted([*SOURCE.rglob("*.py"), *LABORATORY.rglob("*.py")]):
        names = [node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ClassDef)]
        for name in names:
            modules[name].append(str(path))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}
