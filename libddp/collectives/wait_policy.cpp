#include "libddp/collectives/wait_policy.h"

#include <sched.h>

#include <algorithm>
#include <bitset>
#include <cmath>
#include <fstream>
#include <memory>
#include <sstream>

#include "libddp/collectives/shm_page.h"

namespace libddp {
namespace {

constexpr int kMaxCpus = 8192;
using CpuSet = std::bitset<kMaxCpus>;

int digit_of(char character) {
  if (character >= '0' && character <= '9') return character - '0';
  if (character >= 'a' && character <= 'f') return character - 'a' + 10;
  return -1;
}

// Adds the CPUs of `mask`; text that is no mask adds none.
void add_mask(CpuSet& cpus, const std::string& mask) {
  std::size_t cpu = 0;
  for (auto digit = mask.rbegin(); digit != mask.rend() && cpu + 4 <= kMaxCpus; ++digit, cpu += 4) {
    const int value = digit_of(*digit);
    if (value < 0) return;
    for (int bit = 0; bit < 4; ++bit) {
      if (value >> bit & 1) cpus.set(cpu + bit);
    }
  }
}

// The affinity mask; CPU 0 alone where the kernel does not tell.
CpuSet own_cpus() {
  CpuSet cpus;
  std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(kMaxCpus),
                                                       [](cpu_set_t* s) { CPU_FREE(s); });
  const std::size_t bytes = CPU_ALLOC_SIZE(kMaxCpus);
  if (!set || sched_getaffinity(0, bytes, set.get()) != 0) return cpus.set(0);
  for (int cpu = 0; cpu < kMaxCpus; ++cpu) cpus[cpu] = CPU_ISSET_S(cpu, bytes, set.get());
  return cpus;
}

// What the container's cgroup (version 2) grants; none outside of one.
std::optional<int> own_quota() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::string text;
  if (!std::getline(file, text)) return std::nullopt;
  return cpu_quota(text);
}

}  // namespace

std::optional<int> cpu_quota(const std::string& cpu_max) {
  std::istringstream text(cpu_max);
  double quota_us = 0;
  double period_us = 0;
  if (!(text >> quota_us >> period_us) || quota_us <= 0 || period_us <= 0) return std::nullopt;
  return static_cast<int>(std::clamp(std::ceil(quota_us / period_us), 1.0, double{kMaxCpus}));
}

std::string own_cpu_mask_text() {
  const CpuSet cpus = own_cpus();
  int left = own_quota().value_or(kMaxCpus);
  std::string text;
  for (int cpu = 0; cpu < kMaxCpus; cpu += 4) {
    int value = 0;
    for (int bit = 0; bit < 4; ++bit) {
      if (cpus[cpu + bit] && left-- > 0) value |= 1 << bit;
    }
    text.push_back("0123456789abcdef"[value]);
  }
  const std::size_t last = text.find_last_not_of('0');
  text.resize(last == std::string::npos ? 1 : last + 1);
  std::reverse(text.begin(), text.end());
  return text;
}

int count_cpus(const std::vector<std::string>& cpu_masks) {
  CpuSet cpus;
  for (const std::string& mask : cpu_masks) add_mask(cpus, mask);
  return std::max<int>(1, static_cast<int>(cpus.count()));
}

WaitPolicy WaitPolicy::choose(const std::vector<std::string>& cpu_masks) {
  const auto ranks = std::max<std::size_t>(1, cpu_masks.size());
  WaitPolicy policy;
  policy.oversubscribed = static_cast<int>(ranks) > count_cpus(cpu_masks);
  if (policy.oversubscribed) {
    // A barrier costs a context switch per rank; every rank reads every payload.
    policy.spins = 16;
    policy.inline_bytes = std::clamp<std::size_t>((128u << 10) / ranks, 4u << 10, 32u << 10);
    policy.ordinary_inline_bytes = policy.inline_bytes;
    policy.chunk_bytes = ShmPage::kStagingBytes;
  } else {
    policy.spins = 2000;
    policy.inline_bytes = 512;
    policy.ordinary_inline_bytes = std::max<std::size_t>(512, (16u << 10) / ranks);
    policy.chunk_bytes = 512u << 10;
  }
  return policy;
}

}  // namespace libddp
