"""The command `etalon`: see `etalon --help`."""

import signal
import sys

from ._etalon import command


def main():
    # Ctrl-C ends the command, which removes what it has half written.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return command([sys.executable, "-m", "etalon"], ["etalon", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
