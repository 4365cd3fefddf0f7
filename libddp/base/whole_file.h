#pragma once

// Files that readers see whole or not at all. Thread rule: any thread; one writer per path.
//
//   write_whole_file("/logs/flight.json", text);

#include <string>
#include <string_view>

namespace libddp {

/// Writes beside `path`, then renames. Throws Error with the path and the system's reason.
void write_whole_file(const std::string& path, std::string_view text);

}  // namespace libddp
