#pragma once

// What libddp.distributed.fsdp.wrap._sharded_param does for every parameter in every step, where
// nothing unusual has happened. A row is a tuple (param, sharded, unsharded, local, places) of a
// ShardedParam; the lists of rows belong to Python, whose collector must see them.
// Thread rule: with the GIL.

#include <torch/csrc/utils/pybind.h>

namespace libddp {

/// `name` is a string of Python's that was made once.
pybind11::object attribute_of(pybind11::handle object, PyObject* name);

/// What the modules have for parameters from now on: DTensors, or whole plain ones.
void show_faces(const pybind11::list& rows, bool sharded);

/// Whether nobody has given a DTensor other memory or put another object in its place.
bool are_faces_settled(const pybind11::list& rows);

/// ShardedParam.take_over for every row. `nothing`: a tensor without memory.
void take_over_faces(const pybind11::list& rows, pybind11::handle nothing);

/// ShardedParam.show_gradient for every row.
void show_face_gradients(const pybind11::list& rows);

/// Whether one of them has a hook that runs when its average is there.
bool have_face_hooks(const pybind11::list& rows);

}  // namespace libddp
