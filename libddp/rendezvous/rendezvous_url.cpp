#include "libddp/rendezvous/rendezvous_url.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "libddp/base/error.h"

namespace libddp {
namespace {

std::optional<long> parse_number(const std::string& text) {
  long number = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || stop != text.data() + text.size()) return std::nullopt;
  return number;
}

void read_query(const std::string& text, const std::string& query, RendezvousUrl& url) {
  for (std::size_t begin = 0; begin < query.size();) {
    const std::size_t end = std::min(query.find('&', begin), query.size());
    const std::string part = query.substr(begin, end - begin);
    const std::size_t equal = part.find('=');
    const std::string key = part.substr(0, equal);
    if (equal == std::string::npos || (key != "rank" && key != "world_size")) {
      RendezvousUrl::refuse(text, fmt::format("'{}' is neither rank=N nor world_size=N", part));
    }
    const std::string value = part.substr(equal + 1);
    std::optional<long>& place = key == "rank" ? url.rank : url.world_size;
    if (place) RendezvousUrl::refuse(text, fmt::format("{} is given twice", key));
    place = parse_number(value);
    if (!place) RendezvousUrl::refuse(text, fmt::format("{}='{}' is not a number", key, value));
    begin = end + 1;
  }
}

void read_host_and_port(const std::string& text, const std::string& place, RendezvousUrl& url) {
  const std::size_t colon = place.rfind(':');
  if (colon == std::string::npos) RendezvousUrl::refuse(text, "it has no port");
  url.host = place.substr(0, colon);
  if (url.host.size() > 2 && url.host.front() == '[' && url.host.back() == ']') {
    url.host = url.host.substr(1, url.host.size() - 2);  // [::1]
  }
  if (url.host.empty()) RendezvousUrl::refuse(text, "it has no host");
  const std::string digits = place.substr(colon + 1);
  const std::optional<long> port = parse_number(digits);
  if (!port || *port < 1 || *port > 65535) {
    RendezvousUrl::refuse(text, fmt::format("port '{}' is not a number from 1 to 65535", digits));
  }
  url.port = static_cast<std::uint16_t>(*port);
}

}  // namespace

void RendezvousUrl::refuse(const std::string& text, const std::string& problem) {
  throw ArgumentError(
      fmt::format("libddp: init_method '{}': {}. Hint: tcp://host:port?rank=0&world_size=2, "
                  "file:///shared/path?rank=0&world_size=2, or env://.",
                  text, problem));
}

RendezvousUrl RendezvousUrl::parse(const std::string& text) {
  const std::size_t scheme_end = text.find("://");
  const std::string scheme = text.substr(0, scheme_end);
  if (scheme_end == std::string::npos || (scheme != "tcp" && scheme != "file")) {
    refuse(text, "it is none of env://, tcp:// and file://");
  }
  const std::string rest = text.substr(scheme_end + 3);
  const std::size_t question = std::min(rest.find('?'), rest.size());
  const std::string place = rest.substr(0, question);
  RendezvousUrl url;
  url.is_tcp = scheme == "tcp";
  if (question < rest.size()) read_query(text, rest.substr(question + 1), url);
  if (url.is_tcp) {
    read_host_and_port(text, place, url);
  } else {
    if (place.size() < 2 || place.front() != '/') refuse(text, "it has no absolute path");
    url.path = place;
  }
  return url;
}

}  // namespace libddp
