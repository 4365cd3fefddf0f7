#include "libddp/snapshot/snapshot.h"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>
#include <utility>

#include "libddp/base/env.h"
#include "libddp/base/error.h"
#include "libddp/base/files.h"
#include "libddp/base/log.h"
#include "libddp/base/random.h"
#include "libddp/slots/json_text.h"
#include "libddp/slots/memory_limit.h"
#include "libddp/slots/object_folder.h"
#include "libddp/slots/snapshot_folder.h"
#include "libddp/snapshot/direct_save.h"
#include "libddp/snapshot/host_saves.h"
#include "libddp/snapshot/job_ranks.h"
#include "libddp/snapshot/load_attempts.h"
#include "libddp/snapshot/rank_memory.h"
#include "libddp/snapshot/ready_pages.h"
#include "libddp/snapshot/remote_storage.h"
#include "libddp/snapshot/run_name.h"
#include "libddp/snapshot/saved_version.h"
#include "libddp/snapshot/told_slots.h"
#include "libddp/snapshot/version_reader.h"

namespace libddp {
namespace {

/// A slot that the slowest disk holds is waited for; a keeper that does not answer is not.
constexpr std::chrono::seconds kSlotPatience{300};
constexpr std::chrono::milliseconds kPause{5};
/// Less is cleared in a millisecond or two.
constexpr std::uint64_t kWorthPreparing = 4u << 20;
/// What each rank says of its next save, by place.
enum Offered : std::size_t {
  kStep,
  kNeedsMemory,
  kBytesNeeded,
  kBytesReady,
  kIsStored,
  kHasMoved,
  kArrival,
  kCanWrite,  ///< of each slot
  kNumOffered = kCanWrite + SlotMemory::kSlots,
};
/// That may be shown as a number with a sign.
constexpr std::uint64_t kMuchMemory = 1ull << 60;
/// As many as a generation has for them.
constexpr int kStartBytes = 4;

/// Ends the reservation of slots, however a save ends.
class Reservation {
 public:
  explicit Reservation(RankMemory& memory) : memory_(memory) {}
  ~Reservation() { memory_.withdraw(); }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

 private:
  RankMemory& memory_;
};

void check_values(std::string_view values) {
  try {
    parse_json(values);
  } catch (const SnapshotError& error) {
    throw ArgumentError(fmt::format("libddp snapshot: the values are {}.", error.what()));
  }
}

int cores_of_process() {
  cpu_set_t cores;
  if (::sched_getaffinity(0, sizeof(cores), &cores) != 0) return 1;
  return CPU_COUNT(&cores);
}

}  // namespace

std::shared_ptr<Snapshot> Snapshot::create(Group group, Options options) {
  auto ranks = std::make_unique<const JobRanks>(std::move(group));
  ranks->together("make a Snapshot", [&] { check_run_name(options.run); });
  if (options.keep < 1) {
    throw ArgumentError(
        fmt::format("libddp snapshot: keep={} would keep nothing. Hint: 1 or more.", options.keep));
  }
  if (options.replicas < 0 || options.replicas > 1) {
    throw ArgumentError(
        fmt::format("libddp snapshot: replicas={}, and each save has 0 or 1. Hint: the folder "
                    "survives the loss "
                    "of several hosts.",
                    options.replicas));
  }
  if (!options.in_memory && (options.folder.empty() || options.replicas > 0)) {
    throw ArgumentError(
        "libddp snapshot: in_memory=false needs a folder, and sends nothing to other hosts. Hint: "
        "name one.");
  }
  return std::shared_ptr<Snapshot>(new Snapshot(std::move(ranks), std::move(options)));
}

Snapshot::Snapshot(std::unique_ptr<const JobRanks> ranks, Options options)
    : ranks_(std::move(ranks)),
      options_(std::move(options)),
      host_saves_(std::make_unique<HostSaves>(*ranks_, options_.replicas)) {}

Snapshot::~Snapshot() = default;

void Snapshot::check_process() const {
  if (made_.is_current()) return;
  throw StateError(
      "libddp snapshot: called in a child of fork(), which is no rank of the job. Hint: save and "
      "load in the process that made the Snapshot.");
}

void Snapshot::check_open() const {
  check_process();
  if (is_closed_) throw StateError("libddp snapshot: it is closed. Hint: make another one.");
}

bool Snapshot::join(bool may_create) {
  if (memory_) return true;
  if (!options_.in_memory) return false;
  std::string run;
  ranks_->together("find its run", [&] {
    if (ranks_->rank() == 0) run = find_run(may_create);
  });
  run = ranks_->from_first(run);
  if (run.empty()) return false;
  start_ = ranks_->from_first(random_hex(kStartBytes));
  ranks_->together("meet its host's keeper", [&] {
    const SlotIdentity identity{
        .run = run, .rank = ranks_->rank(), .world_size = ranks_->size(), .generation = 0};
    std::optional<KeeperStorage> stored;
    if (!options_.folder.empty()) stored = storage();
    memory_ = std::make_unique<RankMemory>(KeeperStart{.run = run, .linger = options_.linger},
                                           identity, stored);
  });
  std::string own;
  ranks_->together("look into its memory", [&] { own = tell_slots(memory_->fetch()); });
  learn_of(ranks_->gather(own));
  host_saves_->meet(*memory_);
  return true;
}

std::string Snapshot::find_run(bool may_create) const {
  if (!options_.run.empty()) return options_.run;
  if (options_.remote) return ObjectFolder(options_.remote->objects).run(may_create);
  return options_.folder.empty() ? run_of_launcher() : run_of_folder(options_.folder, may_create);
}

void Snapshot::learn_of(const std::vector<std::string>& told) {
  for (const ToldSlot& each : told_slots_of(told)) {
    sequence_ = std::max(sequence_, each.sequence);
    generation_ = std::max(generation_, each.generation);
  }
  if (!options_.folder.empty()) sequence_ = std::max(sequence_, newest_in_folder());
}

std::uint64_t Snapshot::next_generation() const {
  constexpr int kStartBits = 8 * kStartBytes;
  return ((generation_ >> kStartBits) + 1) << kStartBits | start_number();
}

std::uint64_t Snapshot::start_number() const { return std::stoull(start_, nullptr, 16); }

std::uint64_t Snapshot::newest_in_folder() {
  std::string newest;
  ranks_->together("look into the folder", [&] {
    if (ranks_->rank() != 0) return;
    const auto entries = store()->list();
    newest = entries.empty() ? "0" : std::to_string(entries.front().saved.sequence);
  });
  return std::stoull(ranks_->from_first(newest));
}

int Snapshot::num_threads() const {
  if (options_.num_threads > 0) return options_.num_threads;
  return std::max(1, cores_of_process() / ranks_->local_size());
}

KeeperStorage Snapshot::storage() const {
  // Processes with other working folders find it too.
  return {.folder = options_.remote ? options_.folder : absolute_path(options_.folder),
          .start = start_,
          .keep = options_.keep,
          .commits = ranks_->is_on_first_host(),
          .helper = options_.remote ? options_.remote->helper : StorageHelper{}};
}

std::shared_ptr<SnapshotStore> Snapshot::store() const {
  if (options_.remote) return std::make_shared<ObjectFolder>(options_.remote->objects);
  return std::make_shared<SnapshotFolder>(absolute_path(options_.folder));
}

Snapshot::Report Snapshot::save(std::int64_t step, const std::vector<SnapshotTensor>& tensors,
                                std::string_view values, Storage storage) {
  const std::lock_guard lock(mutex_);
  check_open();
  const auto began = std::chrono::steady_clock::now();
  const std::string what = fmt::format("save step {}", step);
  std::optional<OwnPieces> own;
  ranks_->together(what, [&] {
    if (storage == Storage::Folder && options_.folder.empty()) {
      throw ArgumentError(
          "libddp snapshot: it has no folder to store into. Hint: make the Snapshot with one.");
    }
    check_values(values);
    if (storage == Storage::Memory && !options_.in_memory) {
      throw ArgumentError(
          "libddp snapshot: it keeps nothing in memory. Hint: save into its folder.");
    }
    own.emplace(tensors, *ranks_);
  });
  own->check_alike(*ranks_);
  if (!options_.in_memory) {
    sequence_ = std::max(sequence_, newest_in_folder()) + 1;
    const std::uint64_t bytes = save_directly(
        *ranks_, *store(), {.step = step, .sequence = sequence_}, options_.keep, *own, values);
    return {.step = step,
            .bytes = bytes,
            .stall = std::chrono::steady_clock::now() - began,
            .is_stored = true};
  }
  join(/*may_create=*/true);
  std::optional<Reservation> reservation(std::in_place, *memory_);
  const SavePlace place = agree_on_place(what, step, *own, values.size());
  ready_.reset();
  const SavedStep saved{.step = step, .sequence = sequence_ + 1, .start = start_number()};
  // A save that was to be stored and gives its place to this one: this one is stored instead.
  const bool is_stored = storage == Storage::Folder || place.replaces_storing;
  // Also one that fails on some ranks has used it up: no two saves have the same.
  sequence_ = saved.sequence;
  ranks_->together(what, [&] {
    memory_->fill(place.slot, saved, *own, values, num_threads());
    // Before any rank knows that all have filled theirs: other hosts may read it then.
    reservation.reset();
  });
  memory_->commit(place.slot);
  host_saves_->replicate(*memory_);
  if (is_stored) ranks_->together(what, [&] { memory_->store(); });
  return {.step = step,
          .bytes = memory_->data_bytes(),
          .stall = std::chrono::steady_clock::now() - began,
          .is_stored = is_stored};
}

Snapshot::SavePlace Snapshot::agree_on_place(const std::string& what, std::int64_t step,
                                             const OwnPieces& own, std::size_t values_bytes) {
  const Deadline deadline = Deadline::after(kSlotPatience);
  while (true) {
    RankMemory::Offer offer;
    Pulled arrival = Pulled::Here;
    ranks_->together(what, [&] {
      offer = memory_->offer(own, values_bytes);
      arrival = host_saves_->arrival(*memory_);
    });
    Numbers::value_type told(kNumOffered);
    told[kStep] = step;
    told[kNeedsMemory] = offer.needs_memory;
    told[kBytesNeeded] = static_cast<std::int64_t>(offer.bytes_needed);
    told[kBytesReady] = static_cast<std::int64_t>(ready_ ? ready_->bytes() : 0);
    told[kIsStored] = offer.is_stored;
    told[kHasMoved] = offer.has_moved;
    told[kArrival] = static_cast<std::int64_t>(arrival);
    std::copy(offer.can_write.begin(), offer.can_write.end(), told.begin() + kCanWrite);
    const Numbers offers = ranks_->gather_numbers(told);
    check_same_step(offers);
    const auto any = [&](std::size_t number, std::int64_t value) {
      return std::any_of(offers.begin(), offers.end(),
                         [&](const auto& each) { return each[number] == value; });
    };
    if (any(kHasMoved, 1)) host_saves_->meet(*memory_);
    if (any(kNeedsMemory, 1)) {
      memory_->withdraw();
      make_memory(what, own, values_bytes, offers);
      return {};
    }
    std::vector<Pulled> arrivals;
    for (const auto& each : offers) arrivals.push_back(static_cast<Pulled>(each[kArrival]));
    host_saves_->note_arrivals(arrivals, *memory_);
    const bool has_spare = memory_->turns().needs_spare() && may_use_spare(what);
    for (const int slot : memory_->turns().candidates(has_spare)) {
      if (any(kCanWrite + static_cast<std::size_t>(slot), 0)) continue;
      memory_->withdraw(slot);
      return {.slot = slot,
              .replaces_storing = any(kIsStored, 0) && memory_->stored_slot() == slot};
    }
    // All are being stored or copied, each on another host: the slowest one is waited for.
    memory_->withdraw();
    if (deadline.expired()) {
      throw TimeoutError(
          fmt::format("libddp snapshot: rank {} could not {}: its saves were being stored, or "
                      "copied, for {} s. "
                      "Hint: look at the disk of {}, and at the network between the hosts.",
                      ranks_->rank(), what, kSlotPatience.count(), options_.folder));
    }
    std::this_thread::sleep_for(kPause);
  }
}

bool Snapshot::may_use_spare(const std::string& what) {
  MemoryLimit limit;
  ranks_->together(what, [&] { limit = memory_limit(); });
  const Numbers told = ranks_->gather_numbers(
      {static_cast<std::int64_t>(memory_->data_bytes()),
       static_cast<std::int64_t>(std::min(limit.available_bytes, kMuchMemory))});
  for (int host = 0; host < ranks_->hosts().num_hosts(); ++host) {
    const int any_rank = ranks_->hosts().ranks_of(host).front();
    const auto available = static_cast<std::uint64_t>(told[static_cast<std::size_t>(any_rank)][1]);
    const std::uint64_t needed = on_host(told, 0, host);
    if (needed <= available) continue;
    if (ranks_->rank() == 0 && !has_warned_of_spare_) {
      log(LogLevel::Warn, "snapshot_copies_late",
          {{"host_of_rank", any_rank},
           {"bytes_needed", needed},
           {"bytes_left", available},
           {"reason",
            "saves come faster than their copies to the next host, and there is no memory for a "
            "third one: until a copy has arrived, a lost host takes the job back to its folder"}});
    }
    has_warned_of_spare_ = true;
    return false;
  }
  return true;
}

void Snapshot::make_memory(const std::string& what, const OwnPieces& own, std::size_t values_bytes,
                           const Numbers& offers) {
  generation_ = next_generation();
  // Both together: nobody takes what another one has been told is there.
  ranks_->together(what, [&] {
    const std::uint64_t needed = on_host(offers, kBytesNeeded);
    const MemoryLimit limit = memory_limit();
    if (needed > limit.available_bytes + on_host(offers, kBytesReady)) {
      throw StateError(fmt::format(
          "libddp snapshot: two copies of the state of this host's {} ranks need {} bytes of "
          "memory, and {} has {} left. Hint: allow the job more memory, or save fewer tensors.",
          ranks_->local_size(), needed, limit.source, limit.available_bytes));
    }
  });
  ranks_->together(what, [&] {
    SharedSegment reserved;
    if (ready_) reserved = ready_->take();
    memory_->make(own, values_bytes, generation_, std::move(reserved));
  });
}

std::uint64_t Snapshot::on_host(const Numbers& numbers, std::size_t index) const {
  return on_host(numbers, index, ranks_->hosts().host(ranks_->rank()));
}

std::uint64_t Snapshot::on_host(const Numbers& numbers, std::size_t index, int host) const {
  std::uint64_t sum = 0;
  for (const int rank : ranks_->hosts().ranks_of(host)) {
    sum += static_cast<std::uint64_t>(numbers[static_cast<std::size_t>(rank)][index]);
  }
  return sum;
}

void Snapshot::prepare(const std::vector<SnapshotTensor>& tensors) {
  const std::lock_guard lock(mutex_);
  check_open();
  if (!options_.in_memory) return;
  std::optional<PieceLayout> layout;
  ranks_->together("prepare its memory",
                   [&] { layout = PieceLayout::of(OwnPieces(tensors, *ranks_).pieces()); });
  const bool has_it = layout->data_bytes() < kWorthPreparing || ready_ ||
                      (memory_ && memory_->data_bytes() >= layout->data_bytes());
  const std::uint64_t values_capacity = RankMemory::values_capacity(0);
  const std::uint64_t needed = has_it ? 0 : SlotMemory::bytes_needed(*layout, values_capacity);
  const auto needs = ranks_->gather_numbers({static_cast<std::int64_t>(needed)});
  if (std::all_of(needs.begin(), needs.end(), [](const auto& n) { return n[0] == 0; })) return;
  try {
    join(/*may_create=*/true);  // starts the keeper, if need be
    if (has_it || on_host(needs, 0) > memory_limit().available_bytes) return;
    ready_ = std::make_unique<ReadyPages>(SlotMemory::bytes_mapped(*layout, values_capacity),
                                          SlotMemory::data_of_first_save(*layout, values_capacity));
  } catch (const Error& error) {
    log(LogLevel::Warn, "snapshot_not_prepared", {{"reason", error.what()}});
  }
}

std::uint64_t Snapshot::prepared_bytes() {
  const std::lock_guard lock(mutex_);
  return ready_ ? ready_->bytes() : 0;
}

std::vector<std::shared_ptr<SavedVersion>> Snapshot::versions() {
  const std::lock_guard lock(mutex_);
  check_open();
  return find_versions();
}

Snapshot::Versions Snapshot::find_versions() {
  Versions found;
  if (join(/*may_create=*/false)) found = versions_in_memory();
  for (auto& version : versions_in_folder()) found.push_back(std::move(version));
  std::stable_sort(found.begin(), found.end(), [](const auto& one, const auto& other) {
    return one->saved().sequence > other->saved().sequence;
  });
  return found;
}

Snapshot::Versions Snapshot::versions_in_memory() {
  std::string own;
  std::vector<std::shared_ptr<SlotMemory>> memories;
  ranks_->together("look into its memory", [&] {
    memories = memory_->fetch();
    own = tell_slots(memories);
  });
  const std::vector<std::string> told = ranks_->gather(own);
  learn_of(told);
  const std::vector<ToldSlot> slots = told_slots_of(told);
  host_saves_->learn(slots);
  Versions found;
  for (const auto& [key, save] : host_saves_->saves()) {
    if (!save.is_whole()) continue;
    auto version = std::make_shared<SavedVersion>(
        SavedVersion::in_memory(save.slot.saved(), save.slot.world_size, save.slot.generation));
    version->find_places(memories);
    found.push_back(std::move(version));
  }
  if (ranks_->rank() != 0) return found;
  if (found.empty() && !host_saves_->saves().empty()) {
    const HostSaves::Save& newest = host_saves_->saves().rbegin()->second;
    warn_of_lost_ranks(newest.slot, newest.ranks);
  }
  warn_of_damage(slots, ranks_->hosts(), found.empty() ? nullptr : &found.back()->saved());
  return found;
}

Snapshot::Versions Snapshot::versions_in_folder() {
  Versions found;
  if (options_.folder.empty()) return found;
  const auto folder = store();
  std::string own;
  ranks_->together("look into the folder", [&] {
    if (ranks_->rank() != 0) return;
    for (const SnapshotStore::Entry& entry : folder->list()) {
      own += fmt::format("{} {} {}\n", entry.saved.step, entry.saved.sequence, entry.path);
    }
  });
  std::istringstream lines(ranks_->from_first(own));
  std::string line;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    SnapshotStore::Entry entry;
    words >> entry.saved.step >> entry.saved.sequence;
    words.get();
    std::getline(words, entry.path);
    found.push_back(std::make_shared<SavedVersion>(SavedVersion::on_storage(folder, entry)));
  }
  return found;
}

void Snapshot::open(SavedVersion& version) {
  const std::lock_guard lock(mutex_);
  check_open();
  if (version.is_in_memory() && !version.is_open()) host_saves_->bring(version, false, *memory_);
  open_everywhere(version, fmt::format("open {}", version.name()));
}

void Snapshot::open_everywhere(SavedVersion& version, const std::string& what) {
  std::string own;
  ranks_->together(what, [&] {
    version.open(ranks_->rank());
    if (version.sources().empty()) {
      throw SnapshotError(fmt::format(
          "libddp snapshot: {} is on other hosts, and the host of rank {} has nothing of it. Hint: "
          "hosts that have a run key (--run-key-file) fetch from each other.",
          version.name(), ranks_->rank()));
    }
    if (ranks_->local_rank() == 0) own = version.piece_text();
  });
  if (!version.is_in_memory() || ranks_->hosts().num_hosts() == 1) return;
  const std::vector<std::string> told = ranks_->gather(own);
  ranks_->together(what, [&] {
    for (const std::string& text : told) {
      if (!text.empty()) version.add_pieces(text);
    }
  });
}

void Snapshot::read(SavedVersion& version, const std::vector<SnapshotTensor>& tensors) {
  const std::lock_guard lock(mutex_);
  check_open();
  const std::string what = fmt::format("load {}", version.name());
  std::optional<VersionReader> reader;
  const auto prepare = [&] {
    open_everywhere(version, what);
    ranks_->together(what, [&] { reader.emplace(version, tensors); });
  };
  prepare();
  // What the ranks of a host had in common may be on several hosts now.
  const auto lacking = ranks_->gather_numbers({!reader->missing().empty()});
  const bool is_lacking =
      std::any_of(lacking.begin(), lacking.end(), [](const auto& each) { return each[0] != 0; });
  if (is_lacking && version.is_in_memory() && host_saves_->bring(version, true, *memory_)) {
    prepare();
  }
  ranks_->together(what, [&] { reader->run(num_threads()); });
  go_on_from(version);
}

/// The memory that was loaded is written on where each rank has its own, in the same place.
void Snapshot::go_on_from(const SavedVersion& version) {
  if (!version.is_in_memory()) return;
  const SavedVersion::Place* own = nullptr;
  for (const SavedVersion::Place& place : version.places()) {
    const SlotIdentity& identity = place.memory->identity();
    if (identity.rank == ranks_->rank() && identity.world_size == ranks_->size()) own = &place;
  }
  const auto slots = ranks_->gather_numbers({own == nullptr ? -1 : own->slot});
  const bool is_alike = std::all_of(slots.begin(), slots.end(), [&](const auto& each) {
    return each[0] >= 0 && each[0] == slots[0][0];
  });
  if (!is_alike) return;
  memory_->adopt(own->memory, own->slot);
  // Hosts that are new have no copies yet.
  host_saves_->replicate(*memory_);
}

std::optional<std::int64_t> Snapshot::load(const std::vector<SnapshotTensor>& tensors,
                                           std::string* values) {
  const auto step = load_newest([&](SavedVersion& version) {
    open(version);
    read(version, tensors);
    if (values) *values = version.values();
  });
  if (!step) prepare(tensors);
  return step;
}

std::optional<std::int64_t> Snapshot::load_newest(const std::function<void(SavedVersion&)>& take) {
  LoadAttempts attempts;
  for (const auto& version : versions()) {
    try {
      take(*version);
    } catch (const ArgumentError& error) {
      if (!attempts.pass_over(error.what(), /*is_damaged=*/false)) throw;
      continue;
    } catch (const SnapshotError& error) {
      log(LogLevel::Warn, "snapshot_passed_over", {{"reason", error.what()}});
      attempts.pass_over(error.what(), /*is_damaged=*/true);
      continue;
    }
    if (attempts.has_passed_over()) {
      log(LogLevel::Warn, "snapshot_older_loaded", {{"reason", attempts.went_on(version->name())}});
    }
    return version->saved().step;
  }
  attempts.check();
  return std::nullopt;
}

int Snapshot::rank() const { return ranks_->rank(); }

void Snapshot::together(const std::string& what, const std::function<void()>& work) const {
  check_process();
  ranks_->together(what, work);
}

void Snapshot::wait(std::chrono::milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  check_process();
  if (!memory_) return;
  ranks_->together("store its save", [&] { memory_->wait(Deadline::after(timeout)); });
}

void Snapshot::close() {
  const std::lock_guard lock(mutex_);
  check_process();
  is_closed_ = true;
  if (!memory_) return;
  memory_->finish();
  memory_.reset();
}

std::string Snapshot::status() {
  const std::lock_guard lock(mutex_);
  check_process();
  return memory_ ? memory_->status() : "null";
}

}  // namespace libddp
