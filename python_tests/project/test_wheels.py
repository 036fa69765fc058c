"""The script that builds wheels without a container."""

import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import wheels

PROGRAM = """
#include <cmath>
#include <condition_variable>
#include <dlfcn.h>
#include <exception>
#include <stdexcept>
#include <thread>
std::condition_variable ready;
std::mutex guard;
extern "C" long caught(long n) {
  long count = 0;
  for (long i = 0; i < n; ++i) {
    std::exception_ptr kept;
    try {
      throw std::runtime_error("fault");
    } catch (...) {
      kept = std::current_exception();
    }
    std::exception_ptr copy = kept;
    try {
      std::rethrow_exception(copy);
    } catch (const std::runtime_error& error) {
      count += error.what()[0] == 'f' && copy == kept;
    }
  }
  return count;
}
extern "C" double run(double x, long n) {
  std::thread([] {}).join();
  std::unique_lock lock(guard);
  ready.wait(lock, [&] { return n > 0; });
  double* values = new double[n];
  return dlsym(nullptr, "x") ? std::exp(x) : std::log(values[0]);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_linked_with_the_stubs_no_symbol_is_newer_than_manylinux_has(tmp_path: Path) -> None:
    source = tmp_path / "program.cpp"
    source.write_text(PROGRAM)
    arch = platform.machine()
    flags = wheels.write_stubs(tmp_path / "stubs", arch).split()
    library = tmp_path / "program.so"
    subprocess.run(
        ["g++", "-O1", "-shared", "-fPIC", "-o", library, source, *flags], check=True, text=True
    )
    assert wheels.unversioned_symbols(str(library), arch) == []
    call = f"import ctypes; print(ctypes.CDLL({str(library)!r}).caught(1000))"
    assert subprocess.check_output([sys.executable, "-c", call], text=True) == "1000\n"
    table = subprocess.check_output(["readelf", "--dyn-syms", "-W", library], text=True)
    versions = {
        (name, tuple(map(int, number.split("."))))
        for name, number in re.findall(r"@([A-Z]+)_([\d.]+)", table)
    }
    assert {name for name, _ in versions} >= {"GLIBC", "GLIBCXX"}
    assert all(number <= wheels.NEWEST[name] for name, number in versions if name in wheels.NEWEST)


def test_vendored_header_and_its_entry_in_the_wheel_have_one_version() -> None:
    entry = json.loads((wheels.ROOT / "csrc/core/dlpack.cdx.json").read_text())["components"][0]
    header = (wheels.ROOT / "csrc/core/dlpack.h").read_text()
    major, minor = entry["version"].split(".")
    assert f"#define DLPACK_MAJOR_VERSION {major}\n" in header
    assert f"#define DLPACK_MINOR_VERSION {minor}\n" in header
