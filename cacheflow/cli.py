"""The command line: `cacheflow COMMAND ...`. Every command is a module of cacheflow.commands, found by discovery."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from cacheflow import heap
from cacheflow.commands import modules

USER_ERROR = 2  # exit status of what a user can mend; 1 is for a command that ran and found something wrong

EXAMPLES = """\
examples:
  cacheflow simulate                                    every policy on an H100, 4K to 128K tokens, 10 to 80 Gbps
  cacheflow simulate --device A100-40G --tokens 32K --gbps 40
  cacheflow store ls /var/kv                            what a store holds
"""


class Parser(argparse.ArgumentParser):
    """Raises ValueError, in one sentence, where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def parser() -> Parser:
    """The parser with all commands."""
    top = Parser(
        prog="cacheflow",
        description="Bring a cached prefix's KV back by recomputing part of it while loading the rest.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in modules():
        module.add_parser(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0; 1 when it found something wrong; 2 for what the user can mend.

    A user's error ends in one sentence on stderr. Any other exception is a bug and keeps its traceback.
    """
    heap.keep_freed_memory()
    # Before PyTorch is loaded: a core that waits for another one's share of an op is free for the threads that load.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        args = parser().parse_args(argv)
        status = int(args.run(args))
        sys.stdout.flush()  # a reader that is gone shows here, not at exit
        return status
    except SystemExit as done:  # argparse's way out of --help
        return int(done.code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if not _of_user(error):
            raise
        print(f"cacheflow: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR


def _of_user(error: Exception) -> bool:
    from cacheflow.stores.base import StoreError  # late, for NumPy's import takes longer than --help

    return isinstance(error, (ValueError, StoreError))
