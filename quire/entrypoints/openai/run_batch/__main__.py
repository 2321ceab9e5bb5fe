"""`python -m quire.entrypoints.openai.run_batch FLAGS`, as vLLM's guides answer a file: `quire run-batch`."""

import sys

from quire.entrypoints.cli.main import main

sys.exit(main(["run-batch", *sys.argv[1:]]))
