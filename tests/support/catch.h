#pragma once

// Catch2 of either generation: Debian ships 2.13 (one header), others 3.

#if __has_include(<catch2/catch.hpp>)
#include <catch2/catch.hpp>
#else
#include <catch2/catch_all.hpp>
using Catch::Matchers::ContainsSubstring;
#define LIBDDP_CATCH2_V3 1
#endif
