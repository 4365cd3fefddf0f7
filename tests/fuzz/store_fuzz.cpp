// The store of a run with a key (sealed_store.h, bootstrap_session.h): what strangers write is as
// if it were not there; what somebody with the key writes may be wrong, but is read as text only.

#include <string>

#include "libddp/base/error.h"
#include "libddp/bootstrap/bootstrap_failure.h"
#include "libddp/bootstrap/bootstrap_session.h"
#include "libddp/bootstrap/sealed_store.h"
#include "tests/fuzz/fuzz.h"

using namespace libddp;

namespace {

// What rank 1 publishes, and what both may.
constexpr const char* kKeys[] = {"join/1", "join/0", "error", "error_turn"};

void look(BootstrapSession& session) {
  const bool all_came = session.try_all_entries();
  if (!all_came) return;
  fuzz::require(session.has_entry(0) && session.has_entry(1));
  fuzz::require(session.try_entry(1)->rank == 1);
  if (!session.is_open()) session.open();
  session.entries().set("peer/0", "own");
  fuzz::require(session.entries().try_get("peer/0") == "own");
  fuzz::require(!session.entries().try_get("peer/1"));
}

template <typename Call>
void tolerate(Call call) {
  try {
    call();
  } catch (const Error&) {
  }
}

// As a rank that has seen one, and as one that has failed itself.
void fail_with(BootstrapSession& session, bool has_turn) {
  if (const auto failure = find_failure(session.failures())) {
    throw_failure(*failure, failure->message);
  }
  if (!has_turn) return;
  const GroupFailure own{GroupFailure::Kind::Network, "it failed", 0, 1};
  for (int turn = 1; turn <= 2; ++turn) {
    fuzz::require(publish_failure(session.failures(), own).message == own.message);
  }
  const Deadline now = Deadline::after(std::chrono::seconds(0));
  fuzz::require(session.failures().wait_get("error", now).has_value());
  session.failures().remove("error_turn");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const BootstrapOptions options{.rank = 0,
                                        .world_size = 2,
                                        .group_name = "fuzz",
                                        .key = RunKey::from_bytes(std::string(32, 'k'))};
  fuzz::Bytes input(data, size);
  InMemoryStore store;
  SealedStore insider(store, options.key, "run fuzz");
  BootstrapSession session(store, options);
  session.publish();
  bool has_turn = true;
  while (!input.is_empty()) {
    const std::string place = input.piece();
    const unsigned choice = place.empty() ? 0 : static_cast<unsigned char>(place[0]);
    const std::string key = kKeys[choice % 4];
    const bool is_sealed = (choice / 4) % 2 == 1;
    std::string value = input.piece();
    // "@": with the nonce that the own join entry shows, as a failure of this bootstrap has it.
    if (!value.empty() && value[0] == '@') {
      value = "libddp-author-1 0.1 1:0 32:" + session.own().nonce + value.substr(1);
    }
    (is_sealed ? static_cast<KeyValueStore&>(insider) : store).set(key, value);
    tolerate([&] { look(session); });
    has_turn = has_turn && key != "error_turn";
    tolerate([&] { fail_with(session, has_turn); });
    tolerate([&] { session.find_other_claimant(Deadline::after(std::chrono::seconds(0))); });
  }
  return 0;
}
