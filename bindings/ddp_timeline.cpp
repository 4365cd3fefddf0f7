// What libddp.nn.parallel.DistributedDataParallel's explain() and timings() are made of. Plain
// tuples: Python gives them names.

#include "bindings/ddp_timeline.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "libddp/ddp/bucket_layout.h"
#include "libddp/ddp/pass_timeline.h"
#include "libddp/ddp/reducer.h"

namespace py = pybind11;

namespace libddp {
namespace {

/// (is_rebuilt, is_torchs, [(names, dtype, gradient_bytes, total_bytes, is_in_arena), ...],
/// sparse_names)
py::tuple layout_tuple(const BucketLayout& layout) {
  py::list buckets;
  for (const BucketDescription& bucket : layout.buckets) {
    buckets.append(py::make_tuple(bucket.names, bucket.dtype, bucket.gradient_bytes,
                                  bucket.total_bytes, bucket.is_in_arena));
  }
  return py::make_tuple(layout.is_rebuilt, layout.is_torchs, buckets, layout.sparse_names);
}

py::tuple layout(ReplicatedModel& replica) { return layout_tuple(replica.layout()); }

py::tuple pass_tuple(const PassTimes& pass, std::size_t layout) {
  py::list buckets;
  for (const BucketTimes& bucket : pass.buckets) {
    buckets.append(py::make_tuple(bucket.ready_ns, bucket.launched_ns, bucket.done_ns));
  }
  return py::make_tuple(pass.number, pass.forward_begin_ns, pass.forward_end_ns,
                        pass.backward_begin_ns, pass.backward_end_ns, pass.pass_end_ns, buckets,
                        layout);
}

/// ([layout, ...], [(number, five times, [(ready, launched, done), ...], index of layout), ...])
py::tuple timings(ReplicatedModel& replica) {
  std::vector<std::shared_ptr<const BucketLayout>> seen;
  py::list layouts;
  py::list passes;
  for (const PassTimes& pass : replica.timeline().passes()) {
    auto found = std::find(seen.begin(), seen.end(), pass.layout);
    if (found == seen.end()) {
      layouts.append(layout_tuple(*pass.layout));
      found = seen.insert(seen.end(), pass.layout);
    }
    passes.append(pass_tuple(pass, static_cast<std::size_t>(found - seen.begin())));
  }
  return py::make_tuple(layouts, passes);
}

}  // namespace

void bind_ddp_timeline(ReplicatedModelClass& replica) {
  replica.def("before_forward", &ReplicatedModel::before_forward, "Notes the time.")
      .def("group", &ReplicatedModel::group, "The group that it communicates in.")
      .def("layout", &layout, "What lies in which bucket.")
      .def(
          "wait_shares", [](ReplicatedModel& self) { return self.reducer().wait_shares(); },
          "Parts of the time of the last 25 passes in which this rank waited, by rank.")
      .def("timings", &timings, "When what happened in the last passes that synchronised.");
}

}  // namespace libddp
