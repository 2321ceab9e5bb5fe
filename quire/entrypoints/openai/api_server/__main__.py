"""`python -m quire.entrypoints.openai.api_server FLAGS`, as vLLM's server is started in many a chart: `quire serve`."""

import sys

from quire.entrypoints.cli.main import main

sys.exit(main(["serve", *sys.argv[1:]]))
