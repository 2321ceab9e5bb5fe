"""`python -m quire`: the command line without the installed script."""

import sys

from quire.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
