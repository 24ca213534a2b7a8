"""``vllm serve`` as a module: its own command needs a distribution named vllm, and builds for CPUs have other names.

vLLM's module ``api_server`` would leave out what the command does besides: nodes without a front end (``--headless``),
and several front ends.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from tempfile import TemporaryDirectory

METRICS = "PROMETHEUS_MULTIPROC_DIR"  # where the engine's processes leave the counters that /metrics shows


def main() -> None:
    """Run the command with the options of this process."""
    with ExitStack() as until_the_end:
        if METRICS not in os.environ:  # read when vLLM is imported
            os.environ[METRICS] = until_the_end.enter_context(TemporaryDirectory(prefix="kvsift-metrics-"))
        _serve()


def _serve() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as the command does: a fork may not use a GPU
    parser, serve = FlexibleArgumentParser(prog="kvsift serve --engine vllm"), ServeSubcommand()
    serve.subparser_init(parser.add_subparsers())
    options = parser.parse_args([serve.name, *sys.argv[1:]])
    serve.validate(options)
    serve.cmd(options)


if __name__ == "__main__":
    main()
