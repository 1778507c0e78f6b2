// The extension module: each room has its own binding file, and nothing but bindings is beside them.

#include "bindings.h"

NB_MODULE(_native, m) {
  // An executor in a module's global lives until the process ends: not worth a message there.
  nanobind::set_leak_warnings(false);

  kvpool::bind_key(m);
  kvpool::bind_store(m);
  kvpool::bind_index(m);
}
