// The one file that knows Python: pybind11 bindings of the planner and the CPU kernels.
#include <pybind11/pybind11.h>

namespace py = pybind11;

PYBIND11_MODULE(_native, m) {
    m.doc() = "C++ core of xrpo_fast: planner, Student-t quantiles, CPU kernels.";
}
