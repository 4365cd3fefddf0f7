#include "libddp/bootstrap/bootstrap_session.h"

#include <fmt/format.h>
#include <unistd.h>

#include <utility>

#include "libddp/base/backoff.h"
#include "libddp/base/build_info.h"
#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/random.h"
#include "libddp/bootstrap/record.h"

namespace libddp {
namespace {

constexpr RecordForm kJoinForm{"libddp-join-2", "the store holds no join entry of a rank"};
constexpr RecordForm kAuthorForm{"libddp-author-1", "the store holds no rank's failure"};
constexpr std::size_t kNonceDigits = 32;

std::string join_key(int rank) { return fmt::format("join/{}", rank); }

}  // namespace

std::string JoinEntry::encode() const {
  return RecordWriter(kJoinForm, version)
      .integer(rank)
      .integer(world_size)
      .integer(pid)
      .field(nonce)
      .text();
}

JoinEntry JoinEntry::decode(const std::string& text) {
  RecordReader fields(kJoinForm, text);
  JoinEntry join_entry;
  join_entry.version = fields.version();
  join_entry.rank = fields.integer(0);
  join_entry.world_size = fields.integer(0);
  join_entry.pid = fields.integer(0);
  join_entry.nonce = fields.field();
  fields.end();
  if (join_entry.nonce.size() != kNonceDigits) fields.refuse();
  return join_entry;
}

// Failures with their author's nonce in front; what an earlier run left is not there.
class BootstrapSession::FailureStore : public KeyValueStore {
 public:
  explicit FailureStore(BootstrapSession& session) : session_(session) {}

  void set(const std::string& key, const std::string& value) override {
    const JoinEntry& own = session_.own_;
    session_.sealed_.set(
        key, RecordWriter(kAuthorForm).integer(own.rank).field(own.nonce).field(value).text());
  }

  std::optional<std::string> try_get(const std::string& key) override {
    const std::optional<std::string> text = session_.sealed_.try_get(key);
    if (!text) return std::nullopt;
    std::optional<Told> told = read(*text);
    if (!told || !is_current(told->author, told->nonce)) return std::nullopt;
    return std::move(told->value);
  }

  std::optional<std::string> wait_get(const std::string& key, Deadline deadline) override {
    Backoff backoff(std::chrono::milliseconds(10));
    while (true) {
      if (std::optional<std::string> value = try_get(key)) return value;
      if (deadline.expired()) return std::nullopt;
      backoff.pause(deadline);
      check_interrupt();
    }
  }

  long add(const std::string& key, long amount) override {
    return session_.below_.add(key, amount);
  }
  void remove(const std::string& key) override { session_.below_.remove(key); }

 private:
  struct Told {
    int author = 0;
    std::string nonce;
    std::string value;
  };

  // What is of another form is of an earlier run, or of a rank whose join entry shows its version.
  static std::optional<Told> read(const std::string& text) {
    try {
      RecordReader fields(kAuthorForm, text);
      Told told;
      told.author = fields.integer(0);
      told.nonce = fields.field();
      told.value = fields.field();
      fields.end();
      return told;
    } catch (const StoreError&) {
      return std::nullopt;
    }
  }

  bool is_current(int author, const std::string& nonce) {
    const JoinEntry& own = session_.own_;
    if (author == own.rank && nonce == own.nonce) return true;
    // A rank of another world size may be beyond the own one, and a second process may have the
    // own rank: what they hailed with stands in the store.
    if (author >= 0 && author < own.world_size && session_.has_entry(author)) {
      return session_.join_entries_[static_cast<std::size_t>(author)]->nonce == nonce;
    }
    const std::optional<std::string> text = session_.sealed_.try_get(join_key(author));
    return text && JoinEntry::decode(*text).nonce == nonce;
  }

  BootstrapSession& session_;
};

BootstrapSession::BootstrapSession(KeyValueStore& store, const BootstrapOptions& options)
    : options_(options),
      sealed_(store, options.key, "run " + options.group_name),
      below_(store),
      join_entries_(static_cast<std::size_t>(options.world_size)),
      failures_(std::make_unique<FailureStore>(*this)) {
  own_ = {std::string(version()), options.rank, options.world_size, ::getpid(),
          random_hex(kNonceDigits / 2)};
}

BootstrapSession::~BootstrapSession() = default;

void BootstrapSession::publish() {
  sealed_.set(join_key(own_.rank), own_.encode());
  join_entries_[static_cast<std::size_t>(own_.rank)] = own_;
}

bool BootstrapSession::try_all_entries() {
  std::vector<std::string> keys;
  for (int rank = 0; rank < options_.world_size; ++rank) keys.push_back(join_key(rank));
  const auto texts = sealed_.try_get_all(keys);
  if (!texts) return false;
  bool are_all_theirs = true;
  for (int rank = 0; rank < options_.world_size; ++rank) {
    are_all_theirs = take(rank, (*texts)[static_cast<std::size_t>(rank)]) && are_all_theirs;
  }
  return are_all_theirs;
}

bool BootstrapSession::take(int rank, const std::string& text) {
  std::optional<JoinEntry>& join_entry = join_entries_[static_cast<std::size_t>(rank)];
  if (join_entry) return true;
  JoinEntry theirs = JoinEntry::decode(text);
  if (theirs.rank == rank) join_entry = std::move(theirs);
  return join_entry.has_value();
}

const JoinEntry* BootstrapSession::try_entry(int rank) {
  const std::optional<JoinEntry>& join_entry = join_entries_[static_cast<std::size_t>(rank)];
  if (!join_entry) {
    const auto text = sealed_.wait_get(join_key(rank), Deadline::after(kInterruptPeriod));
    if (!text || !take(rank, *text)) return nullptr;
  }
  return &*join_entry;
}

std::optional<JoinEntry> BootstrapSession::find_other_claimant(Deadline deadline) {
  const auto text = sealed_.wait_get(join_key(own_.rank), deadline);
  if (!text) return std::nullopt;
  return JoinEntry::decode(*text);
}

void BootstrapSession::open() {
  std::string nonces;
  for (const std::optional<JoinEntry>& join_entry : join_entries_) nonces += join_entry->nonce;
  session_key_ = options_.key->derive(
      {"libddp session", options_.group_name, std::to_string(options_.world_size), nonces});
  entries_ = std::make_unique<SealedStore>(below_, session_key_, "session " + options_.group_name);
}

}  // namespace libddp
