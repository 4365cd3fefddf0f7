#include "options.h"

#include <getopt.h>

#include <charconv>
#include <limits>
#include <sstream>
#include <stdexcept>

namespace {

const char* const kShortOptions =
    ":h";  // the colon: a missing value is told from an unknown option
const option kLongOptions[] = {
    {"steps", required_argument, nullptr, 's'},
    {"data", required_argument, nullptr, 'd'},
    {"seed", required_argument, nullptr, 'r'},
    {"threads", required_argument, nullptr, 't'},
    {"optimizer", required_argument, nullptr, 'o'},
    {"lr", required_argument, nullptr, 'l'},
    {"device", required_argument, nullptr, 'v'},
    {"snapshot-every", required_argument, nullptr, 'e'},
    {"snapshot-storage", required_argument, nullptr, 'g'},
    {"snapshot-folder", required_argument, nullptr, 'f'},
    {"help", no_argument, nullptr, 'h'},
    {nullptr, 0, nullptr, 0},
};

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument(what + ". Hint: train --help lists the options.");
}

/// A number of type T that fills the whole text and is at least `minimum`.
template <typename T>
T number(const char* name, const std::string& text, T minimum) {
  constexpr T maximum = std::numeric_limits<T>::max();
  T value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  const bool is_in_range = value >= minimum && value <= maximum;  // false for nan
  if (error == std::errc() && stop == end && is_in_range) return value;
  std::ostringstream message;
  message << name << " '" << text << "' is not a number from " << minimum << " to " << maximum;
  refuse(message.str());
}

OptimizerKind optimizer_kind(const std::string& text) {
  if (text == "adamw") return OptimizerKind::AdamW;
  if (text == "zero1") return OptimizerKind::Zero1;
  if (text == "sgd") return OptimizerKind::Sgd;
  refuse("--optimizer '" + text + "' is not 'adamw', 'zero1' or 'sgd'");
}

DeviceKind device_kind(const std::string& text) {
  if (text == "auto") return DeviceKind::Auto;
  if (text == "cpu") return DeviceKind::Cpu;
  if (text == "cuda") return DeviceKind::Cuda;
  refuse("--device '" + text + "' is not 'auto', 'cpu' or 'cuda'");
}

void set_option(Options& options, int code, const std::string& value) {
  if (code == 's') options.steps = number<std::int64_t>("--steps", value, 1);
  if (code == 'd') options.data = value;
  if (code == 'r') options.seed = number<std::uint64_t>("--seed", value, 0);
  if (code == 't') options.threads = number<int>("--threads", value, 1);
  if (code == 'o') options.optimizer = optimizer_kind(value);
  if (code == 'l') options.learning_rate = number<double>("--lr", value, 0.0);
  if (code == 'v') options.device = device_kind(value);
  if (code == 'e') options.snapshot_every = number<std::int64_t>("--snapshot-every", value, 0);
  if (code == 'g') options.snapshot_storage = number<std::int64_t>("--snapshot-storage", value, 0);
  if (code == 'f') options.snapshot_folder = value;
  if (code == 'h') options.help = true;
}

}  // namespace

std::string usage() {
  return "usage: train [options]   (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: see README.md)\n"
         "  --steps N        optimizer steps (100)\n"
         "  --data FILE      text to learn from (the program's own source)\n"
         "  --seed S         weights and batches (1)\n"
         "  --threads N      compute threads of each rank (1)\n"
         "  --optimizer NAME adamw, zero1 (AdamW shared by the ranks; not for sharded models), or\n"
         "                   sgd, which has momentum 0.9 (adamw)\n"
         "  --lr X           learning rate (0.001)\n"
         "  --device NAME    cpu, cuda (the GPU of number LOCAL_RANK), or auto: cuda where there "
         "is\n"
         "                   one, else cpu (auto)\n"
         "  --snapshot-every N    steps between snapshots in memory, for restarts; 0: none (0)\n"
         "  --snapshot-storage N  steps between those in the folder too; 0: none (0)\n"
         "  --snapshot-folder DIR a folder of this run that all ranks see (snapshots)\n";
}

Options parse_options(int argc, char** argv) {
  Options options;
  ::opterr = 0;  // one message, ours
  for (int code; (code = ::getopt_long(argc, argv, kShortOptions, kLongOptions, nullptr)) != -1;) {
    const std::string word = argv[::optind - 1];
    if (code == '?') refuse("unknown option '" + word + "'");
    if (code == ':') refuse("option '" + word + "' needs a value");
    set_option(options, code, ::optarg == nullptr ? "" : ::optarg);
  }
  if (::optind < argc) refuse("unexpected argument '" + std::string(argv[::optind]) + "'");
  return options;
}
