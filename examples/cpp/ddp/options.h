#pragma once

// What the command line of `train` says.

#include <cstdint>
#include <string>

/// Zero1: AdamW whose work and state the ranks share.
enum class OptimizerKind { AdamW, Zero1, Sgd };

/// Auto: CUDA where there is a device, else the CPU.
enum class DeviceKind { Auto, Cpu, Cuda };

struct Options {
  std::int64_t steps = 100;
  std::string data = DEFAULT_DATA;
  std::uint64_t seed = 1;
  /// Compute threads of each rank. Sums depend on their number, so it is not taken from the
  /// machine.
  int threads = 1;
  OptimizerKind optimizer = OptimizerKind::AdamW;
  DeviceKind device = DeviceKind::Auto;
  double learning_rate = 1e-3;
  /// Steps between snapshots in memory, and between those in the folder too; 0: none.
  std::int64_t snapshot_every = 0;
  std::int64_t snapshot_storage = 0;
  std::string snapshot_folder = "snapshots";
  bool help = false;
};

/// The text that --help prints.
std::string usage();

/// Throws std::invalid_argument with the option, its value and what is allowed.
Options parse_options(int argc, char** argv);
