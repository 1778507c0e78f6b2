// The extension module: each room has its own binding files, and nothing but bindings is beside them.

#include <chrono>

#include "bindings.h"

namespace {

// At exit, before Python ends: from now on no thread comes back to the interpreter, and those on their way are in it.
void end_interpreter() {
  using namespace std::chrono_literals;
  kvpool::InterpreterEnd& end = kvpool::interpreter_end;
  end.ender = std::this_thread::get_id();
  end.ending = true;
  const kvpool::ReleasedGil released;
  for (auto left = 5000ms; end.returning > 0 && left > 0ms; left -= 1ms) std::this_thread::sleep_for(1ms);
}

}  // namespace

NB_MODULE(_native, m) {
  // An executor in a module's global lives until the process ends: not worth a message there.
  nanobind::set_leak_warnings(false);

  kvpool::bind_key(m);
  kvpool::bind_store(m);
  kvpool::bind_replies(m);
  kvpool::bind_index(m);
  nanobind::module_::import_("atexit").attr("register")(nanobind::cpp_function(&end_interpreter));
}
