#pragma once

// How the parameters of a unit show copies of their whole tensors. Thread rule: plain data.
//
//   model->show_copies(model->units(), {.with_gradients = true});

namespace libddp {

struct CopyOptions {
  /// `.grad` shows copies of the whole averaged gradients too.
  bool with_gradients = false;
  /// Whether this rank is one that shows them; all take part.
  bool here = true;
};

}  // namespace libddp
