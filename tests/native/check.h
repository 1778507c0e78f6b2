// Tests that register themselves, and a CHECK that stops the program.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace kvpool::test {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Register {
  Register(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

// Waits for a condition; false after ten seconds.
template <typename Condition>
bool eventually(Condition condition) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

}  // namespace kvpool::test

#define TEST(name)                                                    \
  static void name();                                                 \
  static const ::kvpool::test::Register register_##name(#name, name); \
  static void name()

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)

#define CHECK_THROWS(type, expression)                                                    \
  do {                                                                                    \
    bool threw = false;                                                                   \
    try {                                                                                 \
      (void)(expression);                                                                 \
    } catch (const type&) {                                                               \
      threw = true;                                                                       \
    }                                                                                     \
    if (!threw) {                                                                         \
      std::fprintf(stderr, "%s:%d: %s did not throw\n", __FILE__, __LINE__, #expression); \
      std::abort();                                                                       \
    }                                                                                     \
  } while (false)
