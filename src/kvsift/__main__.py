"""``kvsift`` and ``python -m kvsift``. Whatever is imported is imported where Ctrl-C is caught."""

import sys

from kvsift.collector import collector_paused


def main() -> None:
    """Run the command line; a Ctrl-C that comes before a command has begun ends it without a word."""
    try:
        with collector_paused():
            from kvsift.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
