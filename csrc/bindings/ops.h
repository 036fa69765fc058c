// One function per file of this folder; module.cpp calls them all.
#pragma once

#include <pybind11/pybind11.h>

namespace skyrl_fast {

void bind_advantage(pybind11::module_& m);

}  // namespace skyrl_fast
