"""CUDA toolkit that FlashInfer compiles with: the machine's own, or one made of pip's wheels.

pip installs nvidia-cuda-nvcc and its dependencies in one folder, `nvidia/cu13`, but their libraries are not where
FlashInfer looks for them. Therefore a folder in the user's cache arranges them like a toolkit, by symbolic links.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

_USUAL = Path("/usr/local/cuda")


def find_cuda_home(environ: Mapping[str, str] = os.environ, usual: Path = _USUAL) -> Path | None:
    """Return the folder of a toolkit with a compiler on this machine, found as FlashInfer finds it, or None."""
    named = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if named is not None:
        return Path(named) if (Path(named) / "bin" / "nvcc").exists() else None
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    if nvcc is not None:
        return Path(nvcc).parent.parent
    return usual if (usual / "bin" / "nvcc").exists() else None


def find_wheels(search: Iterable[str] | None = None) -> Path | None:
    """Return the folder of pip's compiler, `.../nvidia/cu13`, or None. `search`: folders of packages named nvidia."""
    if search is None:
        spec = importlib.util.find_spec("nvidia")
        search = (spec and spec.submodule_search_locations) or ()
    found = [nvcc.parent.parent for folder in search for nvcc in Path(folder).glob("cu*/bin/nvcc")]
    return max(found, default=None)


def arrange_wheels(wheels: Path, folder: Path, driver_library: Path | None) -> Path:
    """Make `folder` a toolkit of links to pip's files, and return it. OSError if it cannot be written.

    `driver_library`: the driver's libcuda.so.1, against which FlashInfer links.
    """
    links = {name: wheels / name for name in ("bin", "include", "lib", "nvvm")}
    links |= {f"lib64/{file.name.partition('.so')[0]}.so": file for file in (wheels / "lib").glob("*.so*")}
    links |= {f"lib64/{file.name}": file for file in (wheels / "lib").glob("*.a")}
    if driver_library is not None:
        links["lib64/stubs/libcuda.so"] = driver_library
    for name, target in links.items():
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_symlink() and link.readlink() == target:
            continue
        beside = link.with_name(f"{link.name}.{os.getpid()}")  # another process may be doing the same
        beside.symlink_to(target)
        beside.replace(link)
    return folder


def provide_cuda_home() -> Path | None:
    """Return the toolkit that FlashInfer will find, or None. Must be called before FlashInfer is imported.

    For pip's toolkit this sets CUDA_HOME, because FlashInfer has no other setting for it.
    """
    home = find_cuda_home()
    wheels = find_wheels() if home is None else None
    if wheels is None:
        return home
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minisgl" / "cuda"
    with suppress(OSError):
        home = arrange_wheels(wheels, cache, _driver_library())
        os.environ["CUDA_HOME"] = str(home)
    return home


def _driver_library() -> Path | None:
    """Return the path of the libcuda.so.1 that this process has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if "/libcuda.so" in f"/{path}":
            return Path(f"/{path}")
    return None
