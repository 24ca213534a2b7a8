"""``python -m kvsift`` is ``kvsift``."""

from kvsift.cli.main import main

main()
