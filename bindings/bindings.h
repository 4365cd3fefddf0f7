#pragma once

// The parts of libddp._C. Each binds one room's classes and functions; module.cpp calls them all.
// Rule: cast, release the interpreter lock, call. No logic lives here.

#include <torch/csrc/utils/pybind.h>

#include <exception>

namespace libddp {

void bind_errors(pybind11::module_& module);
/// What a function that CPython calls without pybind11 ends with: sets the Python error as pybind11
/// would. With the interpreter lock.
void set_python_error(std::exception_ptr exception);
void bind_build_info(pybind11::module_& module);
void bind_process_group(pybind11::module_& module);
void bind_backend(pybind11::module_& module);
void bind_straight(pybind11::module_& module);
/// Ctrl-C ends waits, and callback threads end before the interpreter does.
void bind_interpreter(pybind11::module_& module);
void bind_ddp(pybind11::module_& module);
void bind_activation(pybind11::module_& module);
void bind_fsdp(pybind11::module_& module);
void bind_fsdp_faces(pybind11::module_& module);
void bind_optim(pybind11::module_& module);
void bind_elastic(pybind11::module_& module);
void bind_snapshot(pybind11::module_& module);
void bind_snapshot_folder(pybind11::module_& module);

}  // namespace libddp
