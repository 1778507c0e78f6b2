// The bar of `kvpool bench store`: the plainest native loop over the same server or directory. Plain GET and SET, or
// pread and pwrite; blocking calls, a bounded window, straight between the caller's buffers and the system. It proves
// nothing of what it moves, lets nothing expire, and gives up at the first surprise. For measuring, not for use.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "store/descriptor.h"
#include "store/socket.h"

namespace kvpool {

using BareBuffers = std::vector<std::span<std::byte>>;

// Values of one size, spread over the connections. Every call blocks until all are moved, a call of the system for 30 s
// at most; throws Unreachable or std::runtime_error, and is of no use after that.
class BareServer {
 public:
  // `password` empty: no AUTH.
  BareServer(const Endpoint& endpoint, const std::string& user, const std::string& password,
             unsigned database, unsigned connections);
  BareServer(const BareServer&) = delete;
  BareServer& operator=(const BareServer&) = delete;

  void put(const std::vector<std::string>& keys, const BareBuffers& buffers);
  void get(const std::vector<std::string>& keys, const BareBuffers& buffers);

 private:
  std::vector<Descriptor> connections_;
};

// A file for each value, in one directory that is there. The same contract.
class BareFiles {
 public:
  BareFiles(std::filesystem::path folder, unsigned threads);
  void put(const std::vector<std::string>& names, const BareBuffers& buffers);
  void get(const std::vector<std::string>& names, const BareBuffers& buffers);

 private:
  const std::filesystem::path folder_;
  const unsigned threads_;
};

}  // namespace kvpool
