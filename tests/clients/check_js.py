"""The openai and langchain packages for JavaScript, by js/check.mjs."""

import sys

import node

sys.exit(node.run("js"))
