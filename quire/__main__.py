"""The command line, as `quire` and as `python -m quire`: an interrupt is quiet even while modules are imported."""

import sys


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        from quire.entrypoints.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
