"""Whether a package index, whose address is given, answers within a few seconds: exit code 0, else 1.

The Makefile asks before it names one to pip, which would try a dead one for minutes.
"""

import sys
import urllib.request

_SECONDS = 5.0


def answers(url: str) -> bool:
    """Whether the index has a page for torch."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/torch/", timeout=_SECONDS) as response:
            return response.status == 200
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    sys.exit(not answers(sys.argv[1]) if len(sys.argv) == 2 else __doc__)
