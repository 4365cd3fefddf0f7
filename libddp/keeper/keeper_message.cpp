#include "libddp/keeper/keeper_message.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "libddp/base/env.h"
#include "libddp/base/error.h"
#include "libddp/kernels/crc32c.h"
#include "libddp/slots/json_text.h"

namespace libddp {
namespace {

using nlohmann::json;

constexpr int kMessageVersion = 2;
constexpr std::array kCalls{"hello",     "put",    "get",         "store",  "wait",
                            "status",    "finish", "complete",    "listen", "pull",
                            "wait_pull", "pulled", "store_newest"};
constexpr std::array kPurposes{"own", "replica", "next_replica"};
constexpr std::array kPulled{"failed", "coming", "here"};

/// The value of a key if it is there; of another type it is an error.
template <typename T>
void read(const json& object, const char* name, T& value) {
  const auto found = object.find(name);
  if (found == object.end()) return;
  try {
    if constexpr (std::is_same_v<T, bool>) {
      if (!found->is_boolean()) throw SnapshotError("");
    } else if constexpr (std::is_integral_v<T>) {
      if (!found->is_number_integer()) throw SnapshotError("");
      if (std::is_unsigned_v<T> && !found->is_number_unsigned()) throw SnapshotError("");
      const auto number = found->get<std::int64_t>();
      if (static_cast<std::int64_t>(static_cast<T>(number)) != number) throw SnapshotError("");
    }
    value = found->get<T>();
  } catch (const std::exception&) {
    throw SnapshotError(fmt::format("'{}' is of another type, or out of range", name));
  }
}

template <typename Enum, std::size_t count>
const char* word_of(const std::array<const char*, count>& words, Enum value) {
  return words[static_cast<std::size_t>(value)];
}

/// The word of an enumeration, if it is there.
template <typename Enum, std::size_t count>
void read_word(const json& object, const char* name, const std::array<const char*, count>& words,
               Enum& value) {
  std::string word = words[static_cast<std::size_t>(value)];
  read(object, name, word);
  const auto found = std::find(words.begin(), words.end(), word);
  if (found == words.end()) throw SnapshotError(fmt::format("'{}' is an unknown word", name));
  value = static_cast<Enum>(found - words.begin());
}

json parsed(std::string_view text) {
  json document = parse_json(text, {.max_bytes = kKeeperLimits.max_bytes});
  if (!document.is_object()) throw SnapshotError("a message is no object");
  return document;
}

KeeperStorage storage_of(const json& object) {
  if (!object.is_object()) throw SnapshotError("'storage' is no object");
  KeeperStorage storage;
  read(object, "folder", storage.folder);
  read(object, "start", storage.start);
  read(object, "keep", storage.keep);
  read(object, "commits", storage.commits);
  read(object, "helper", storage.helper.program);
  read(object, "environment", storage.helper.environment);
  if (storage.folder.empty() || storage.keep < 1) throw SnapshotError("'storage' names no folder");
  const bool is_word =
      !storage.start.empty() &&
      storage.start.find_first_not_of(
          "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ") == std::string::npos;
  if (!is_word) throw SnapshotError("'start' is no word of letters and digits");
  return storage;
}

}  // namespace

std::string KeeperRequest::encode() const {
  json document{{"version", kMessageVersion},
                {"call", word_of(kCalls, call)},
                {"run", run},
                {"agent", agent},
                {"is_worker", is_worker},
                {"rank", rank},
                {"generation", generation},
                {"slot", slot},
                {"sequence", sequence},
                {"address", address},
                {"purpose", word_of(kPurposes, purpose)},
                {"ranks", ranks}};
  if (storage) {
    document["storage"] = {{"folder", storage->folder},
                           {"start", storage->start},
                           {"keep", storage->keep},
                           {"commits", storage->commits},
                           {"helper", storage->helper.program},
                           {"environment", storage->helper.environment}};
  }
  return to_text(document);
}

KeeperRequest KeeperRequest::decode(std::string_view text) {
  const json document = parsed(text);
  int version = 0;
  read(document, "version", version);
  if (version != kMessageVersion) {
    throw SnapshotError(
        fmt::format("a message of version {}, this is version {}", version, kMessageVersion));
  }
  KeeperRequest request;
  if (!document.contains("call")) throw SnapshotError("no call");
  read_word(document, "call", kCalls, request.call);
  read(document, "run", request.run);
  read(document, "agent", request.agent);
  read(document, "is_worker", request.is_worker);
  read(document, "rank", request.rank);
  read(document, "generation", request.generation);
  read(document, "slot", request.slot);
  read(document, "sequence", request.sequence);
  read(document, "address", request.address);
  read_word(document, "purpose", kPurposes, request.purpose);
  read(document, "ranks", request.ranks);
  if (const auto storage = document.find("storage"); storage != document.end()) {
    request.storage = storage_of(*storage);
  }
  return request;
}

std::string KeeperReply::encode() const {
  return to_text({{"version", kMessageVersion},
                  {"error", error},
                  {"is_busy", is_busy},
                  {"address", address},
                  {"pulled", word_of(kPulled, pulled)},
                  {"status", parse_json(status)}});
}

KeeperReply KeeperReply::decode(std::string_view text) {
  const json document = parsed(text);
  KeeperReply reply;
  read(document, "error", reply.error);
  read(document, "is_busy", reply.is_busy);
  read(document, "address", reply.address);
  read_word(document, "pulled", kPulled, reply.pulled);
  if (const auto found = document.find("status"); found != document.end()) {
    reply.status = to_text(*found);
  }
  return reply;
}

void KeeperReply::check() const {
  if (!error.empty()) throw SnapshotError(error);
}

std::string keeper_name(const std::string& run, const std::string& host) {
  const std::string given = host.empty() ? env_text("LIBDDP_HOST_ID").value_or("") : host;
  const std::string name = fmt::format("libddp-keeper-{}-{}", ::geteuid(), run);
  if (given.empty()) return name;
  return fmt::format("{}-{:08x}", name, crc32c(given.data(), given.size()));
}

}  // namespace libddp
