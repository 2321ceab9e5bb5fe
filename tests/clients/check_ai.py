"""The Vercel `ai` package, by ai/check.mjs."""

import sys

import node

sys.exit(node.run("ai"))
