"""What the program `labkit` runs first: Ctrl-C while the commands are still being imported ends it without a word.

Imports take half a second, and on a busy machine several; a KeyboardInterrupt in the midst of them is a page of
traceback about files that nobody asked for. Once they are there, each command says what it left.
"""

from __future__ import annotations

import signal


def main() -> None:
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where a shell has it ignored
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from labkit import cli

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


if __name__ == "__main__":
    main()
