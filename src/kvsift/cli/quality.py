"""kvsift quality: exact match of plans on retrieval tasks; placeholder until the tasks land."""


def quality() -> None: ...
