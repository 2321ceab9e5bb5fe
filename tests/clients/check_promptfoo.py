"""promptfoo, by promptfoo/check.mjs."""

import sys

import node

sys.exit(node.run("promptfoo"))
