#pragma once

// What stands for the parameters of a model where scripts see them, if it is not the parameters
// themselves: a language binding's sharded tensors. Their `.grad` and `requires_grad` are what
// counts; the units' own follow.
// Thread rule: called by the thread that runs the model's forward or backward.
//
//   class Shown final : public ParameterFaces { ... };
//   auto model = ShardedModel::create(units, {.faces = std::make_shared<Shown>()});

namespace libddp {

class ParamGroup;

/// Each function may throw.
class ParameterFaces {
 public:
  virtual ~ParameterFaces() = default;
  /// A unit's parameters show whole tensors from now on, or what this rank owns of them.
  virtual void show(ParamGroup& unit, bool whole) = 0;
  /// A step or a pass begins: takes what scripts have changed over to the units' parameters.
  virtual void take_over() = 0;
  /// A pass has put gradients into the units' parameters: shows them.
  virtual void show_gradients() = 0;
  /// The same in the middle of a pass, of one unit.
  virtual void show_gradients(ParamGroup& unit) = 0;
  /// Hooks that users want to be run when a unit's averages are there: see NOTE [Late hooks].
  virtual bool has_late_hooks(ParamGroup& unit) = 0;
  /// Of those parameters that have got averages.
  virtual void run_late_hooks(ParamGroup& unit) = 0;
};

}  // namespace libddp
