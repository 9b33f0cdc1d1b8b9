"""Lets the CUDA build of torch import and train on a CPU without the CUDA libraries.

PyPI has no CPU-only torch, and the CUDA libraries the wheel links against are
2.5 GB. On a CPU none of their functions is ever called, but the dynamic loader
wants each library and symbol to exist. This script reads what `torch/lib/*.so`
needs, compiles libraries of empty functions under those names, and puts them
beside it, where torch's RPATH (`$ORIGIN`) finds them. `cudaGetDeviceCount`
answers "no device", everything else an error code.

For tests and benchmarks only; never ship the result. Usage:

    python stub_cuda.py        # in the virtual environment that holds torch
"""

import re
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path

VENDOR = re.compile(r"lib(cu|nccl|nvrtc|nvshmem|nvToolsExt|nvJitLink|npp|nvjpeg)\w*\.so")
# The driver itself: only loaded lazily, and its absence is how torch learns that there is no GPU.
SKIPPED = ("libcuda.so",)
VENDOR_SYMBOL = re.compile(r"^_{0,2}(cu|nccl|nvrtc|nvshmem|nvtx)[A-Za-z]\w*$")
CUDA_ERROR_NO_DEVICE = 100


def readelf(*arguments: str) -> str:
    return subprocess.run(
        ["readelf", "-W", *arguments], check=True, capture_output=True, text=True
    ).stdout


def needed_by(library: Path) -> set[str]:
    found = re.findall(r"\(NEEDED\).*\[(.+?)\]", readelf("-d", str(library)))
    return {name for name in found if VENDOR.match(name) and not name.startswith(SKIPPED)}


def version_owners(library: Path) -> dict[str, str]:
    """Which needed file each symbol version comes from."""
    owners, file = {}, ""
    for line in readelf("-V", str(library)).splitlines():
        if match := re.search(r"File: (\S+)", line):
            file = match.group(1)
        elif match := re.search(r"Name: (\S+)\s+Flags", line):
            owners[match.group(1)] = file
    return owners


def undefined_symbols(library: Path) -> list[tuple[str, str]]:
    """(name, version or "") of each symbol that another library must bring."""
    symbols = []
    for line in readelf("--dyn-syms", str(library)).splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[6] == "UND":
            name, _, version = fields[7].partition("@")
            symbols.append((name, version.lstrip("@")))
    return symbols


def collect(directory: Path) -> dict[str, dict[str, set[str]]]:
    """Missing library -> version ("" for none) -> symbols."""
    stubs: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    present = [path for path in directory.iterdir() if ".so" in path.name and path.is_file()]
    for library in present:
        if VENDOR.match(library.name):
            continue
        needed = needed_by(library)
        for name in needed:
            stubs[name]  # noqa: B018 (a library must exist even if nothing of it is used)
        owners = version_owners(library)
        for name, version in undefined_symbols(library):
            if version and owners.get(version) in needed:
                stubs[owners[version]][version].add(name)
            elif not version and VENDOR_SYMBOL.match(name) and needed:
                # An unversioned symbol may come from any library that is loaded.
                stubs[min(needed)][""].add(name)
    return stubs


def compile_stub(directory: Path, soname: str, versions: dict[str, set[str]]) -> None:
    source, script = [], []
    for version, names in sorted(versions.items()):
        for name in sorted(names):
            value = CUDA_ERROR_NO_DEVICE if name.startswith(("cuda", "cu")) else 1
            source.append(f"long {name}(void) {{ return {value}; }}")
        if version:
            script.append(f"{version} {{ global: {' '.join(f'{n};' for n in sorted(names))} }};")
    with tempfile.TemporaryDirectory() as work:
        c_file, map_file = Path(work, "stub.c"), Path(work, "stub.map")
        c_file.write_text("\n".join(source) + "\n")
        map_file.write_text("\n".join(script) + "\n")
        command = ["cc", "-shared", "-fPIC", "-fno-builtin", "-O1", "-w", f"-Wl,-soname,{soname}"]
        if script:
            command.append(f"-Wl,--version-script={map_file}")
        subprocess.run([*command, "-o", str(directory / soname), str(c_file)], check=True)


def main() -> int:
    directory = Path(sysconfig.get_path("purelib"), "torch", "lib")
    if not directory.is_dir():
        print(f"error: no torch in {directory.parent.parent}", file=sys.stderr)
        return 1
    nvidia = directory.parent.parent / "nvidia"
    if nvidia.is_dir():
        print("the CUDA libraries are installed; no stubs needed", file=sys.stderr)
        return 0
    for soname, versions in sorted(collect(directory).items()):
        compile_stub(directory, soname, versions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
