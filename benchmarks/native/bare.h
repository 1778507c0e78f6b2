// The bar of `python -m benchmarks store`: the plainest native loops over the same server or directory. Plain GET and
// SET, or pread and pwrite; blocking calls, a bounded window, straight between the caller's buffers and the system. They
// check nothing of what they move, let nothing expire, and give up at the first surprise. For measuring, not for use.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace bare {

using Buffers = std::vector<std::span<std::byte>>;

// Values of one size, spread over connections that are made: blocking sockets, whose timeouts bound each call of the
// system. A call blocks until all are moved; throws std::runtime_error, and then the connections are of no more use.
void put_values(const std::vector<int>& connections, const std::vector<std::string>& keys,
                const Buffers& buffers);
void get_values(const std::vector<int>& connections, const std::vector<std::string>& keys,
                const Buffers& buffers);

// A file for each value, by so many threads. The same contract. `direct`: past the page cache, over the file that is
// there; buffers then begin and end at multiples of 512.
void write_files(const std::vector<std::string>& paths, const Buffers& buffers, unsigned threads,
                 bool direct);
void read_files(const std::vector<std::string>& paths, const Buffers& buffers, unsigned threads, bool direct);

}  // namespace bare
