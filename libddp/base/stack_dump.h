#pragma once

// Where the threads of this process are, in words. The embedding program knows: Python's
// interpreter can tell its threads' stacks without its lock, even while they hang.
//
// Thread rule: any thread; the dumper must not need a lock that a stuck thread may hold.
//
//   set_stack_dumper([] { return stacks_as_text(); });
//   std::string text = dump_stacks();   // "" where nobody knows

#include <string>

namespace libddp {

using StackDumper = std::string (*)();

/// Installs `dumper` for the process, nullptr for none; returns the one before.
StackDumper set_stack_dumper(StackDumper dumper);

/// Never throws; empty where there is no dumper or it failed.
std::string dump_stacks() noexcept;

/// "load (data.py:31) < train (train.py:12)": the innermost calls of the last thread of a dump in
/// the form of Python's faulthandler, which is the main thread; empty if there is none. Where all
/// of these lie in Python's or a package's files, the innermost of the program's own follows: "wait
/// (threading.py:3) < get (queue.py:4) < join (queue.py:5) < ... < load (data.py:31)".
std::string brief_stack(const std::string& dump);

}  // namespace libddp
