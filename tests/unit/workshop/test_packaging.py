"""The package's metadata and its pinned set-up say the same thing, and nothing of one machine; and what is built from
them, with the compiled kernels and without, holds what it should.
"""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import quire

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = dict(
    line.lower().replace("_", "-").split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
)


def requirement_name(requirement: str) -> str:
    return re.split(r"[\[<>=~!; ]", requirement.lower())[0]


def test_every_dependency_is_pinned() -> None:
    extras = PROJECT["optional-dependencies"].values()
    for requirement in [*PROJECT["dependencies"], *(r for extra in extras for r in extra)]:
        assert requirement_name(requirement) in PINNED, requirement


def test_constraints_are_plain_pins() -> None:
    assert all(re.fullmatch(r"[\w.]+", version) for version in PINNED.values())
    assert not re.search(r"://|@|file:|/", (ROOT / "constraints.txt").read_text())


def test_triton_is_what_torch_for_cuda_asks_for() -> None:
    """Or pip sets up no machine with a GPU; torch for CPUs, which tests run with, asks for none."""
    assert (PINNED["torch"], PINNED["triton"]) == ("2.13.0", "3.7.1"), (
        "look what the metadata of another torch asks for"
    )


def test_runtime_needs_no_transformers() -> None:
    assert "transformers" not in {requirement_name(r) for r in PROJECT["dependencies"]}


def test_version_has_one_source() -> None:
    assert PROJECT["dynamic"] == ["version"]
    assert (
        f"## [{quire.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
        or "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
    )


def test_what_ships_is_there() -> None:
    assert (ROOT / "quire" / "py.typed").exists()
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


LIBRARY = "quire/ops/native/_kernels.so"
CMAKE = shutil.which("cmake") or importlib.util.find_spec("cmake")
needs_backend = pytest.mark.skipif(not importlib.util.find_spec("scikit_build_core"), reason="needs scikit-build-core")
needs_cmake = pytest.mark.skipif(not CMAKE, reason="needs cmake")
needs_compiler = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "c++")), reason="needs a C++ compiler")


def build(kind: str, into: Path, root: Path = ROOT, /, **environment: str) -> Path:
    """A wheel or an sdist of a checkout. It is the build backend of this environment that builds: no network."""
    code = f"import sys; from scikit_build_core import build; build.build_{kind}(sys.argv[1])"
    ours = {name: value for name, value in os.environ.items() if name != "QUIRE_NO_NATIVE"}
    command = [sys.executable, "-c", code, str(into)]
    into.mkdir(exist_ok=True)
    done = subprocess.run(command, cwd=root, env=ours | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = into.iterdir()
    return built


@needs_backend
@pytest.mark.slow
@pytest.mark.parametrize(
    "environment", [{"QUIRE_NO_NATIVE": "1"}, pytest.param({"CXX": "/bin/false"}, marks=needs_cmake)], ids=str
)
def test_wheel_without_a_compiler_is_pure_python(tmp_path: Path, environment: dict[str, str]) -> None:
    wheel = build("wheel", tmp_path, **environment)
    assert wheel.name == f"quire-{quire.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"quire/__init__.py", "quire/py.typed", "quire/demo/model.safetensors"} <= names
    for heads in ("medusa", "eagle", "eagle3"):
        assert f"quire/demo/{heads}/model.safetensors" in names
    assert LIBRARY not in names
    files = (path for path in (ROOT / "quire").rglob("*") if path.is_file() and path.suffix not in (".pyc", ".so"))
    assert {path.relative_to(ROOT).as_posix() for path in files} <= names


@needs_backend
@pytest.mark.slow
def test_what_a_wheel_holds_runs_without_the_checkout(tmp_path: Path) -> None:
    """The command, the bundled model and its heads, and the pages, from an installation that has no kernels."""
    wheel = build("wheel", tmp_path / "wheel", QUIRE_NO_NATIVE="1")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = """if True:
        from quire import LLM, SamplingParams
        from quire.entrypoints.server.pages import _page
        from quire.ops.native.library import levels
        assert levels() == ["torch"] and "<script>" in _page("index.html") + _page("docs.html")
        llm = LLM("demo", speculative_config={"model": "demo-eagle", "num_speculative_tokens": 2}, show_progress=False)
        (output,) = llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        print(len(output.outputs[0].token_ids), __import__("quire").__file__)
    """
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    for name in ("QUIRE_NATIVE_LIBRARY", "QUIRE_KERNELS"):
        environment.pop(name, None)

    def told(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert told("-c", code).split() == ["4", str(tmp_path / "site/quire/__init__.py")]
    assert told("-m", "quire", "--version") == f"quire {quire.__version__}\n"


def without_code(level: str) -> str:
    """`level.cpp` with its tables of kernels, and no kernel: what takes a compiler minutes."""
    bare = re.sub(
        r"{name, ns::.*}", "{name, nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr, 0, nullptr, nullptr}", level
    )
    return re.sub(r'#include "(?!kernels)\w+.h"\n', "", bare)


@pytest.fixture
def sketch(tmp_path: Path) -> Path:
    """This checkout, with levels of kernels that hold none."""
    root = tmp_path / "sketch"
    for folder in ("quire", "csrc"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for file in ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, root)
    level = root / "csrc/level.cpp"
    level.write_text(without_code(level.read_text()))
    return root


def check_wheel_with_library(root: Path, into: Path, **environment: str) -> None:
    # Without -O3 the compiler is six times as fast.
    wheel = build("wheel", into / "wheel", root, SKBUILD_CMAKE_BUILD_TYPE="Debug", **environment)
    assert wheel.name.startswith(f"quire-{quire.__version__}-py3-none-")
    library = ctypes.CDLL(zipfile.ZipFile(wheel).extract(LIBRARY, into))
    library.quire_level.restype = ctypes.c_char_p
    assert library.quire_level(0)


@needs_backend
@needs_cmake
@needs_compiler
@pytest.mark.slow
def test_wheel_with_the_kernels_serves_every_python(sketch: Path, tmp_path: Path) -> None:
    check_wheel_with_library(sketch, tmp_path)


@needs_backend
@needs_cmake
@needs_compiler
@pytest.mark.nightly
@pytest.mark.parametrize("levels", ["", "QUIRE_HAVE_AVX512_BF16=OFF;QUIRE_HAVE_AMX=OFF"], ids=["all", "old compiler"])
def test_wheel_with_all_their_code(tmp_path: Path, levels: str) -> None:
    check_wheel_with_library(ROOT, tmp_path, SKBUILD_CMAKE_DEFINE=levels)


@needs_backend
@pytest.mark.slow
def test_sdist_can_be_built_from(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "CMakeLists.txt", "csrc/level.cpp", "csrc/kernels.h", "quire/demo/config.json"} <= names
    assert not [name for name in names if name.endswith(".so") or name.startswith("build/")]
