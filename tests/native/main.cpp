// Usage: kvpool_native_tests [part of a test's name]
#include <cstring>

#include "check.h"

int main(int argc, char** argv) {
  int ran = 0;
  for (const auto& test : kvpool::test::tests()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    const auto begin = std::chrono::steady_clock::now();
    std::printf("%-60s ", test.name);
    std::fflush(stdout);
    test.body();
    std::printf("%6.2f s\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    ++ran;
  }
  std::printf("%d tests passed\n", ran);
  return ran == 0 ? 1 : 0;
}
