"""Find the GPU compiler and make it known to jax.

It is jax's CUDA plugin without its nvidia-* dependencies, in a folder of its own: beside a CPU-only
jax it prints a traceback at every start.
"""

import importlib.util
import os
import pathlib
import sys

import jax

COMPILER_VARIABLE = "PAXKV_GPU_COMPILER"
"""Environment variable that names the compiler's folder."""

_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_DEFAULT_FOLDER = pathlib.Path(__file__).parents[2] / ".gpu-compiler"


class CompilerMissingError(RuntimeError):
    """jax's CUDA plugin cannot be imported; the message says how to install it."""


def compiler_folder() -> pathlib.Path | None:
    """Where the CUDA plugin lies: the variable's folder, or `.gpu-compiler` beside the package.

    None when neither has it; the plugin may still be installed beside jax.
    """
    named = os.environ.get(COMPILER_VARIABLE)
    for folder in (pathlib.Path(named) if named else None, _DEFAULT_FOLDER):
        if folder is not None and (folder / "jax_plugins").is_dir():
            return folder
    return None


def load_compiler() -> None:
    """Make the CUDA plugin known to jax, which must not have started its backends.

    Keeps jax on the CPU for the rest of the process: give this a process of its own.

    Raises:
        CompilerMissingError: the plugin is not there.
    """
    folder = compiler_folder()
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    plugin = next(filter(None, map(_find_package, _PLUGINS)), None)
    if plugin is None:
        raise CompilerMissingError(
            f"jax's CUDA plugin is neither in ${COMPILER_VARIABLE}, nor in {_DEFAULT_FOLDER}, nor "
            "on the path: it is the compiler, about 0.4 GB. Install it into a folder of its own:\n"
            f"  pip install --no-deps --target DIR jax-cuda13-plugin=={jax.__version__} "
            f"jax-cuda13-pjrt=={jax.__version__}\n"
            f"and name that: {COMPILER_VARIABLE}=DIR (or have it on PYTHONPATH)."
        )
    # Mosaic GPU looks for its runtime once, at import, which may have been before the path grew.
    os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", str(plugin / "libmosaic_gpu_runtime.so"))
    # With "cuda" among the platforms the plugin would look for the libraries that only a GPU needs.
    jax.config.update("jax_platforms", "cpu")


def _find_package(name: str) -> pathlib.Path | None:
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else pathlib.Path(spec.origin).parent
