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


def find_compiler() -> pathlib.Path | None:
    """The CUDA plugin's package: on the path, in the variable's folder, or in `.gpu-compiler`.

    The path first, since two plugins in one process clash. None when it is nowhere.
    """
    specs = filter(None, map(importlib.util.find_spec, _PLUGINS))
    found = [pathlib.Path(spec.origin).parent for spec in specs if spec.origin]
    named = os.environ.get(COMPILER_VARIABLE)
    for folder in (*([pathlib.Path(named)] if named else []), _DEFAULT_FOLDER):
        found += [folder.absolute() / plugin for plugin in _PLUGINS if (folder / plugin).is_dir()]
    return found[0] if found else None


def load_compiler() -> None:
    """Make the CUDA plugin known to jax, which must not have started its backends.

    Keeps jax on the CPU for the rest of the process: give this a process of its own.

    Raises:
        CompilerMissingError: the plugin is not there.
    """
    plugin = find_compiler()
    if plugin is None:
        raise CompilerMissingError(
            f"jax's CUDA plugin is neither on the path, nor in ${COMPILER_VARIABLE}, nor in "
            f"{_DEFAULT_FOLDER}: it is the compiler, about 0.4 GB. Install it into a folder of its "
            "own:\n"
            f"  pip install --no-deps --target DIR jax-cuda13-plugin=={jax.__version__} "
            f"jax-cuda13-pjrt=={jax.__version__}\n"
            f"and name that: {COMPILER_VARIABLE}=DIR (or have it on PYTHONPATH)."
        )
    if str(plugin.parent) not in sys.path:
        sys.path.insert(0, str(plugin.parent))
    # Mosaic GPU looks for its runtime once, at import, which was before the path grew.
    os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", str(plugin / "libmosaic_gpu_runtime.so"))
    # With "cuda" among the platforms the plugin would look for the libraries that only a GPU needs.
    jax.config.update("jax_platforms", "cpu")
